"""Fills a batch template with a job's values."""

from __future__ import annotations

import shlex

from jinja2 import Environment, PackageLoader, StrictUndefined

from trimaran.slurm.job_spec import PORT_SHIFT, JobSpec


def render(job: JobSpec) -> str:
    """The batch script of a job."""
    environment = Environment(
        loader=PackageLoader("trimaran.slurm", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # a shell script; values are quoted where the shell reads them
    )
    environment.filters["quote"] = shlex.quote
    template = environment.get_template(f"{job.template.replace('-', '_')}.sbatch")
    return template.render(job=job, port_shift=PORT_SHIFT)
