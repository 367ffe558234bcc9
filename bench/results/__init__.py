"""Result lines, and the tables and plots made from them.

Owns the form of a result: measurement, device, versions, commit and command. In: results of a
benchmark; files of result lines. Out: lines appended to a file; Markdown tables and SVG plots.
This package measures nothing.
"""
