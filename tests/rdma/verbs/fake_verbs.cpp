#include "tests/rdma/verbs/fake_verbs.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace deep_ep::rdma::verbs::test {
namespace {

FakeVerbs* fake = nullptr;
constexpr std::uint32_t kFirstQueuePair = 0x1000;  // completion queues have lower numbers

int post_send(ibv_qp*, ibv_send_wr* requests, ibv_send_wr** refused) {
  for (ibv_send_wr* request = requests; request != nullptr; request = request->next) {
    if (fake->post_accepts == 0) {
      *refused = request;
      return ENOMEM;
    }
    --fake->post_accepts;
    fake->posted.push_back({*request, request->num_sge > 0 ? *request->sg_list : ibv_sge{}});
  }
  return 0;
}

int poll_cq(ibv_cq*, int room, ibv_wc* completions) {
  int count = 0;
  for (; count < room && !fake->completions.empty(); ++count) {
    completions[count] = fake->completions.front();
    fake->completions.pop_front();
  }
  return count;
}

template <class T>
T* made(T* thing) {
  ++fake->alive;
  return thing;
}
int ended() {
  --fake->alive;
  return 0;
}

ibv_mr* region(void* address, std::size_t bytes, std::uint64_t first, unsigned access) {
  fake->registered.push_back({address, bytes, first, access});
  ibv_mr mr{};
  mr.lkey = 0x100 + static_cast<std::uint32_t>(fake->regions.size());
  mr.rkey = 0x200 + static_cast<std::uint32_t>(fake->regions.size());
  return made(&fake->regions.emplace_back(mr));
}

void fill(VerbsFunctions& f) {
  f.get_device_list = [](int* count) {
    static ibv_device* list[2];
    list[0] = &fake->device;
    list[1] = nullptr;
    *count = 1;
    return list;
  };
  f.free_device_list = [](ibv_device**) {};
  f.get_device_name = [](ibv_device* device) -> const char* { return device->name; };
  f.open_device = [](ibv_device*) { return fake->refuses("open_device") ? nullptr : made(&fake->context); };
  f.close_device = [](ibv_context*) { return ended(); };
  f.query_device = [](ibv_context*, ibv_device_attr* attributes) {
    *attributes = fake->attributes;
    return 0;
  };
  f.query_port = [](ibv_context*, std::uint8_t, _compat_ibv_port_attr* attributes) {
    std::memcpy(static_cast<void*>(attributes), &fake->port, sizeof(fake->port));
    return 0;
  };
  f.query_gid = [](ibv_context*, std::uint8_t, int index, ibv_gid* gid) {
    *gid = {};
    const auto found = fake->gids.find(index);
    if (found != fake->gids.end()) std::memcpy(gid->raw, found->second.data(), 16);
    return 0;
  };
  f.alloc_pd = [](ibv_context*) { return fake->refuses("alloc_pd") ? nullptr : made(&fake->domain); };
  f.dealloc_pd = [](ibv_pd*) { return ended(); };
  f.reg_mr_iova2 = [](ibv_pd*, void* address, std::size_t bytes, std::uint64_t first, unsigned access) -> ibv_mr* {
    return fake->refuses("reg_mr_iova2") ? nullptr : region(address, bytes, first, access);
  };
  f.reg_dmabuf_mr = [](ibv_pd*, std::uint64_t, std::size_t bytes, std::uint64_t first, int, int access) -> ibv_mr* {
    return fake->refuses("reg_dmabuf_mr") ? nullptr : region(nullptr, bytes, first, static_cast<unsigned>(access));
  };
  f.dereg_mr = [](ibv_mr*) { return ended(); };
  f.create_cq = [](ibv_context*, int, void*, ibv_comp_channel*, int) -> ibv_cq* {
    return fake->refuses("create_cq") ? nullptr : made(&fake->completion_queue);
  };
  f.destroy_cq = [](ibv_cq*) { return ended(); };
  f.create_qp = [](ibv_pd*, ibv_qp_init_attr* attributes) -> ibv_qp* {
    if (fake->refuses("create_qp")) return nullptr;
    if (static_cast<int>(attributes->cap.max_send_wr) > fake->attributes.max_qp_wr) {
      errno = EINVAL;
      return nullptr;
    }
    ibv_qp& pair = fake->queue_pairs.emplace_back();
    pair.context = &fake->context;
    pair.qp_num = 0x10 + static_cast<std::uint32_t>(fake->queue_pairs.size());
    return made(&pair);
  };
  f.modify_qp = [](ibv_qp* pair, ibv_qp_attr* attributes, int mask) {
    if (fake->refuses("modify_qp")) return errno;
    if (auto rule = fake->firmware.refuse(fake->facts(), pair, *attributes, mask); !rule.empty()) {
      fake->broken_rules.push_back(rule);
      return EINVAL;
    }
    fake->firmware.set_state(pair, attributes->qp_state);
    fake->state_changes.push_back({*attributes, mask});
    return 0;
  };
  f.destroy_qp = [](ibv_qp*) { return ended(); };
  f.create_ah = [](ibv_pd*, ibv_ah_attr*) {
    return fake->refuses("create_ah") ? nullptr : made(&fake->address_handle);
  };
  f.destroy_ah = [](ibv_ah*) { return ended(); };
  f.get_async_event = [](ibv_context*, ibv_async_event* event) {
    *event = fake->take_event();
    return 0;
  };
  f.ack_async_event = [](ibv_async_event*) {};
  f.event_type_str = [](ibv_event_type type) { return type == IBV_EVENT_DEVICE_FATAL ? "device fatal" : "event"; };
  f.port_state_str = [](ibv_port_state state) { return state == IBV_PORT_DOWN ? "down" : "another"; };
}

// ---- DevX ----

void put(void* mailbox, std::uint32_t bit, std::uint32_t width, std::uint64_t value) {
  auto* bytes = static_cast<std::uint8_t*>(mailbox);
  for (std::uint32_t i = 0; i < width; ++i) {
    const std::uint32_t at = bit + width - 1 - i;
    if ((value >> i & 1) != 0) bytes[at / 8] = static_cast<std::uint8_t>(bytes[at / 8] | 0x80U >> at % 8);
  }
}

/// Records the command; writes the firmware's refusal into the answer, if it has one for this opcode or by its rules.
int command(const char* call, const void* in, std::size_t bytes, void* out, std::size_t out_bytes) {
  const auto* begin = static_cast<const std::uint8_t*>(in);
  fake->commands.push_back({call, {begin, begin + bytes}});
  std::memset(out, 0, out_bytes);
  const auto refusal = fake->firmware_refusals.find(fake->commands.back().opcode());
  if (refusal == fake->firmware_refusals.end()) {
    const auto broken = fake->firmware.refuse(fake->facts(), MailboxView(fake->commands.back().mailbox));
    if (!broken) return 0;
    fake->broken_rules.push_back(broken->rule);
    put(out, 0x00, 8, broken->status);
    put(out, 0x20, 32, broken->syndrome);
    return EREMOTEIO;
  }
  put(out, 0x00, 8, refusal->second.status);
  put(out, 0x20, 32, refusal->second.syndrome);
  return refusal->second.error;
}

mlx5dv_devx_umem* memory(std::uint32_t first_id, const mlx5dv_devx_umem_in& request) {
  const auto id = first_id + 0x100 * static_cast<std::uint32_t>(fake->umems.size());
  // What a dma-buf leads to is aligned to GPUs' large pages.
  const auto address = reinterpret_cast<std::uintptr_t>(request.addr);
  if (fake->firmware.add_memory(id, address, request.size, request.pgsz_bitmap) == 0) {
    errno = EINVAL;
    return nullptr;
  }
  return made(&fake->umems.emplace_back(mlx5dv_devx_umem{.umem_id = id}));
}

void count_up(const UniqueFd& counter) {
  const std::uint64_t one = 1;
  if (::write(counter.get(), &one, sizeof(one)) != sizeof(one)) throw std::runtime_error("eventfd");
}
void count_down(const UniqueFd& counter) {
  std::uint64_t count = 0;
  if (::read(counter.get(), &count, sizeof(count)) != sizeof(count)) throw std::runtime_error("eventfd");
}

/// A handle that names its number.
mlx5dv_devx_obj* object(std::uintptr_t number) { return reinterpret_cast<mlx5dv_devx_obj*>(number); }

void fill(Mlx5Functions& f) {
  f.init_obj = [](mlx5dv_obj* objects, std::uint64_t types) {
    if (fake->refuses("init_obj")) return errno;
    if ((types & MLX5DV_OBJ_PD) != 0) objects->pd.out->pdn = kProtectionDomain;
    if ((types & MLX5DV_OBJ_AH) != 0) objects->ah.out->av = &fake->address_vector;
    return 0;
  };
  f.general_cmd = [](ibv_context*, const void* in, std::size_t bytes, void* out, std::size_t out_bytes) {
    const int error = command("general_cmd", in, bytes, out, out_bytes);
    if (error != 0) return error;
    if (fake->commands.back().opcode() == 0x842) {
      put(out, 0x55, 3, fake->port_select_mode);
      put(out, 0x5d, 3, fake->lag_state);
    } else {
      put(out, 0x80 + 0x1fc, 4, fake->completion_version);
      put(out, 0x80 + 0x27c, 4, 2);
    }
    return 0;
  };
  f.obj_create = [](ibv_context*, const void* in, std::size_t bytes, void* out,
                    std::size_t out_bytes) -> mlx5dv_devx_obj* {
    const int error = command("obj_create", in, bytes, out, out_bytes);
    if (error != 0) {
      errno = error;
      return nullptr;
    }
    const bool queue = fake->commands.back().opcode() == 0x400;
    const std::uint32_t number = queue ? fake->next_completion_queue++ : fake->next_queue_pair++;
    queue ? fake->firmware.add_completion_queue(number) : fake->firmware.add_queue_pair(number);
    put(out, 0x48, 24, number);
    return made(object(number));
  };
  f.obj_modify = [](mlx5dv_devx_obj*, const void* in, std::size_t bytes, void* out, std::size_t out_bytes) {
    const int error = command("obj_modify", in, bytes, out, out_bytes);
    const FakeVerbs::Command& change = fake->commands.back();
    if (error == 0) {
      fake->firmware.set_state(static_cast<std::uint32_t>(change.get(0x48, 24)), change.opcode() - 0x501);
    }
    return error;
  };
  f.obj_query = [](mlx5dv_devx_obj*, const void* in, std::size_t bytes, void* out, std::size_t out_bytes) {
    const int error = command("obj_query", in, bytes, out, out_bytes);
    if (error == 0) {
      put(out, 0xc0, 4, fake->queue_pair_state);
      put(out, 0xc0 + 0x5a0, 16, fake->fetched);
      put(out, 0xc0 + 0x5b0, 16, fake->told);
    }
    return error;
  };
  f.obj_destroy = [](mlx5dv_devx_obj* handle) {
    const auto number = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(handle));
    fake->calls.push_back(number < kFirstQueuePair ? "destroy CQ" : "destroy QP");
    fake->firmware.remove_object(number);
    return ended();
  };
  f.qp_query = [](ibv_qp*, const void* in, std::size_t bytes, void* out, std::size_t out_bytes) {
    const int error = command("qp_query", in, bytes, out, out_bytes);
    if (error == 0) put(out, 0xc0 + 0x60, 8, fake->counter_set);
    return error;
  };
  f.umem_reg_ex = [](ibv_context*, mlx5dv_devx_umem_in* request) -> mlx5dv_devx_umem* {
    const bool dma_buf = (request->comp_mask & 1) != 0;
    if (fake->refuses(dma_buf ? "umem_reg_ex dma-buf" : "umem_reg_ex")) return nullptr;
    fake->registered.push_back({request->addr, request->size, 0, request->access});
    return memory(dma_buf ? 0x32 : 0x31, *request);
  };
  f.umem_dereg = [](mlx5dv_devx_umem* memory) {
    fake->firmware.remove_memory(memory->umem_id);
    fake->calls.emplace_back("umem_dereg");
    return ended();
  };
  f.alloc_uar = [](ibv_context*, std::uint32_t flags) -> mlx5dv_devx_uar* {
    const char* kind = flags == 1 ? "alloc_uar NC" : "alloc_uar BF";
    if (fake->refuses(kind)) return nullptr;
    fake->firmware.add_register(fake->uar.page_id);
    return made(&fake->uar);
  };
  f.free_uar = [](mlx5dv_devx_uar* page) {
    fake->firmware.remove_register(page->page_id);
    fake->calls.emplace_back("free_uar");
    ended();
  };
  f.query_eqn = [](ibv_context*, std::uint32_t, std::uint32_t* number) {
    *number = kEventQueue;
    return fake->refuses("query_eqn") ? errno : 0;
  };
}

}  // namespace

FakeVerbs::FakeVerbs() : event_count_(::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE)) {
  fake = this;
  functions = {};
  mlx5 = {};
  fill(functions);
  fill(mlx5);
  std::strcpy(device.name, "fake_0");
  context.device = &device;
  context.async_fd = event_count_.get();
  context.ops.post_send = post_send;
  context.ops.poll_cq = poll_cq;
  completion_queue.context = &context;
  attributes.max_qp_wr = 8192;
  attributes.phys_port_cnt = 1;
  attributes.max_cqe = 65536;
  attributes.max_qp_init_rd_atom = 16;
  attributes.max_qp_rd_atom = 16;
  attributes.atomic_cap = IBV_ATOMIC_HCA;
  port.state = IBV_PORT_ACTIVE;
  port.link_layer = IBV_LINK_LAYER_ETHERNET;
  port.active_mtu = IBV_MTU_4096;
  port.gid_tbl_len = 8;
  gids[3] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 0, 1};
  uar.page_id = 0x66;
  const std::array<std::uint8_t, 6> mac{0x02, 0x11, 0x22, 0x33, 0x44, 0x55};
  std::copy(mac.begin(), mac.end(), address_vector.rmac);
}

FakeVerbs::~FakeVerbs() { fake = nullptr; }

bool FakeVerbs::refuses(const std::string& function) {
  calls.push_back(function);
  const auto found = refusals.find(function);
  if (found == refusals.end()) return false;
  const auto left = refusals_left.find(function);
  if (left != refusals_left.end() && left->second-- <= 0) return false;
  errno = found->second;
  return true;
}

void FakeVerbs::complete(std::size_t posted_index, ibv_wc_status status, std::uint32_t vendor) {
  ibv_wc completion{};
  completion.wr_id = posted.at(posted_index).request.wr_id;
  completion.status = status;
  completion.vendor_err = vendor;
  completions.push_back(completion);
}

void FakeVerbs::raise(ibv_event_type event) {
  ibv_async_event raw{};
  raw.event_type = event;
  raw.element.port_num = 1;
  events_.push_back(raw);
  count_up(event_count_);
}

ibv_async_event FakeVerbs::take_event() {
  count_down(event_count_);
  const ibv_async_event event = events_.front();
  events_.pop_front();
  return event;
}

FirmwareFacts FakeVerbs::facts() const {
  FirmwareFacts facts{.attributes = attributes, .port = port, .gid_indices = {}};
  if (!counter_set_is_foreign) facts.counter_sets.insert(counter_set);
  for (const auto& [index, gid] : gids) facts.gid_indices.insert(index);
  return facts;
}

}  // namespace deep_ep::rdma::verbs::test
