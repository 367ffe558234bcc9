"""Metrics, statistics and the board of process groups.

Owns ``nv_inference_*``, ``nv_trt_llm_*`` and Trimaran's own series of one front end.
In: counts of models, reports of engines and of the supervisor.
Out: the text of the metrics port, statistics answers, rates for the operator's page.
Counts of several front ends are added up here.
"""
