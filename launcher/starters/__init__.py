"""Start and end of the processes of one group: the `Starter` protocol.

In comes a `GroupSpec` (command, environment, time limits); out go processes, and callbacks when
one of them ends. Implementations: a direct child (mpirun, or a lone process), a Slurm step, a
group that the orchestrator spawns. Beside them: the process tree, process watches, the run
folder and MPI's session directories, and the composition of mpirun's command line.
"""
