# The environment of deep_ep, made by `deep_ep env` --profile infiniband. The library also works with no variable set.
# profile infiniband: a run that finds no NIC fails instead of copying within one host
export DEEP_EP_RDMA_WIRE='verbs'
# profile infiniband: GPUs use NICs of their own PCIe switch directly
export NCCL_NET_GDR_LEVEL='PIX'
