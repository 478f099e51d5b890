"""What people have of their machine: NCCL's topology XML, and the matrix of nvidia-smi topo -m."""
