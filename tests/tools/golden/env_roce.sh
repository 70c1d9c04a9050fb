# The environment of deep_ep, made by `deep_ep env` --profile generic-roce. The library also works with no variable set.
# Note: NVSHMEM_IB_SL='seventeen' is ignored: not a number from 0 to 15
# set
export DEEP_EP_TIMEOUT_S='30'
# profile generic-roce: a run that finds no NIC fails instead of copying within one host
export DEEP_EP_RDMA_WIRE='verbs'
# detected: the automatic choice for this machine's GPUs and NICs
export DEEP_EP_DEVICE_TO_HCA_MAPPING='0:roce_rail0:1,1:rocep1:1,2:a:1,3:b:1,4:c:1,5:d:1,6:e:1,7:f:1'
# stands for DEEP_EP_RDMA_GID_INDEX
export NCCL_IB_GID_INDEX='3'
# stands for DEEP_EP_RDMA_TRAFFIC_CLASS
export NCCL_IB_TC='104'
# stands for DEEP_EP_LOG
export NCCL_DEBUG='INFO'
# set
export DEEP_EP_LOG_FILE='/tmp/it'\''s $HOME'
# profile generic-roce: RoCE v2 over IPv4, as deep_ep prefers, too
export NCCL_IB_ADDR_FAMILY='AF_INET'
# profile generic-roce: RoCE v2
export NCCL_IB_ROCE_VERSION_NUM='2'
# profile generic-roce: GPUs use NICs of their own PCIe switch directly
export NCCL_NET_GDR_LEVEL='PIX'
# detected: the NICs of the map
export NCCL_IB_HCA='=roce_rail0:1,rocep1:1,a:1,b:1,c:1,d:1,e:1,f:1'
