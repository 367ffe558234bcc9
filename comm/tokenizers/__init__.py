"""Tokenizers as the processes without torch use them.

In comes a Hugging Face tokenizer folder in any form that transformers reads; out goes a
`PreparedTokenizer`: a complete ``tokenizer.json``, and what that file does not hold. A child
process converts a folder once, because transformers is slow to import. The result is kept in
the user's cache under a digest of the folder's files.
"""
