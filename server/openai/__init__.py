"""The OpenAI wire: completions, chats, responses, their routes and their port.

Owns the schemas of requests, chat templates, tool parsers and the events of streams.
In: HTTP requests on the OpenAI port; chat templates of tokenizer folders.
Out: `TextRequest` for the text models, and answers, events and errors in OpenAI's form.
Bodies, connections, access control and tokenizers are those of the other rooms.
"""
