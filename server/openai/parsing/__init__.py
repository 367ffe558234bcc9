"""Outputs of models cut into reasoning, text and tool calls, and the grammars of calls.

Owns the forms in which families of models write reasoning and tool calls.
In: the text of an output, in any parts; the schemas of a request's tools.
Out: segments, and structural tags for guided decoding.
"""
