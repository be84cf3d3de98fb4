"""The two runtimes behind one protocol: processes (torch.distributed) and ranks in one process."""
