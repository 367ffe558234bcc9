"""What the MPI of the orchestrator must be told before it starts."""

from __future__ import annotations

from pathlib import Path


def mpi_settings() -> dict[str, str]:
    """The environment variables, for Open MPI 5 or newer."""
    return {
        # Without this, the death of one spawned rank ends the orchestrator and every group.
        "OMPI_MCA_mpi_ft_enable": "1",
        "OMPI_MCA_mca_base_param_file_path": str(Path(__file__).parent / "mca"),
        # Groups are placed by us; MPI would count cores, and bind the groups to the same.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
