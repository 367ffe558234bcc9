"""Draft tokens: which tokens probably come next, and how many of them are worth verifying.

In come sequences with their ids on the host, and the outcomes of verified drafts; out go
draft ids (`Drafter`) and their number for each sequence of a step (`DraftController`). The
scheduler turns draft ids into rows of a step. No draft changes an output: each draft token is
compared with the token that the model chooses at its position.
"""
