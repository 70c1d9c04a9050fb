# The environment of deep_ep, made by `deep_ep env` --profile gke-a4. The library also works with no variable set.
# detected: the automatic choice for this machine's GPUs and NICs
export DEEP_EP_DEVICE_TO_HCA_MAPPING='0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:1,3:mlx5_3:1,4:mlx5_4:1,5:mlx5_5:1,6:mlx5_6:1,7:mlx5_7:1'
# profile gke-a4: the class that this network carries RDMA in, gIB's NCCL_IB_TC
export DEEP_EP_RDMA_TRAFFIC_CLASS='52'
# profile gke-a4: Google's plug-in
export NCCL_NET='gIB'
# profile gke-a4: rails: NIC i talks to NIC i
export NCCL_CROSS_NIC='0'
# profile gke-a4: a GPU and its NIC share a PCIe switch
export NCCL_NET_GDR_LEVEL='PIX'
# profile gke-a4: gIB's value for A4
export NCCL_P2P_NET_CHUNKSIZE='131072'
# profile gke-a4: gIB's value for A4
export NCCL_NVLS_CHUNKSIZE='524288'
# profile gke-a4: gIB's value for A4
export NCCL_IB_ADAPTIVE_ROUTING='1'
# profile gke-a4: several paths through the network
export NCCL_IB_QPS_PER_CONNECTION='4'
# profile gke-a4: traffic class of data
export NCCL_IB_TC='52'
# profile gke-a4: traffic class of NCCL's control messages
export NCCL_IB_FIFO_TC='84'
# profile gke-a4: gIB's tuner for A4
export NCCL_TUNER_CONFIG_PATH='/usr/local/gib/configs/tuner_config_a4.txtpb'
# profile gke-a4: the plug-in's libraries, last
export LD_LIBRARY_PATH='/usr/local/nvidia/lib64:/usr/local/gib/lib64'
# gIB refuses to start beside it: "NCCL/NET (shim) mismatch recommended".
unset TORCH_NCCL_USE_COMM_NONBLOCKING
