"""Result lines and what is made of them.

Owns the form of a result: measurement, device, versions, commit and command.
In: figures of a benchmark; files of result lines.
Out: lines appended to a file; Markdown tables and SVG plots.
Nothing here measures.
"""
