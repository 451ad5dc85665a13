"""What a run tells, and where it goes: lines, metrics, files and the names of folders."""
