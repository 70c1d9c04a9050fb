#include "tools/launch/link.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "csrc/support/format.hpp"

namespace deep_ep::tools {
namespace {

/// What each side says first. A login shell may print something before; the line break ends that.
constexpr std::string_view kGreeting = "\ndeep_ep launch 1\n";
constexpr std::size_t kHeader = 1 + sizeof(std::uint32_t);
constexpr std::size_t kMostBytesOfWord = 1U << 20;

}  // namespace

Link::Link(Loop& loop, UniqueFd in, UniqueFd out, Handlers handlers)
    : loop_(loop), in_(std::move(in)), out_(std::move(out)), handlers_(std::move(handlers)) {
  for (const int fd : {in_.get(), out_.get()}) ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  loop_.watch(in_.get(), [this] { receive(); });
  unsent_ = kGreeting;
  flush();
}

Link::~Link() { close(); }

void Link::close() {
  for (UniqueFd* one : {&in_, &out_}) {
    if (*one) loop_.forget(one->get());
    *one = UniqueFd();
  }
}

void Link::fail_with(const std::string& why) {
  if (!in_) return;
  close();
  // The handler may destroy this.
  const auto on_end = handlers_.on_end;
  on_end(why);
}

void Link::send(Word word, std::string_view body) {
  if (!out_) return;
  const auto length = static_cast<std::uint32_t>(body.size());
  unsent_ += static_cast<char>(word);
  for (int shift = 0; shift < 32; shift += 8) unsent_ += static_cast<char>(length >> shift & 0xFF);
  unsent_ += body;
  flush();
}

void Link::set_reading(bool on) {
  if (!in_ || on == reading_) return;
  reading_ = on;
  heard_ = Clock::now();
  if (on) {
    loop_.watch(in_.get(), [this] { receive(); });
  } else {
    loop_.forget(in_.get());
  }
}

void Link::flush() {
  std::size_t sent = 0;
  while (out_ && sent < unsent_.size()) {
    const ssize_t count = ::write(out_.get(), unsent_.data() + sent, unsent_.size() - sent);
    if (count > 0) {
      sent += static_cast<std::size_t>(count);
    } else if (errno == EAGAIN) {
      unsent_.erase(0, sent);
      return loop_.watch_room(out_.get(), [this] { flush(); });
    } else if (errno != EINTR) {
      // What the other side has said is still there to be read: receive() will meet the end.
      loop_.forget(out_.get());
      out_ = UniqueFd();
    }
  }
  unsent_.clear();
  if (out_) loop_.watch_room(out_.get(), nullptr);
}

void Link::receive() {
  std::array<char, 65536> bytes;
  const ssize_t count = ::read(in_.get(), bytes.data(), bytes.size());
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count <= 0 && !greeted_ && handlers_.on_noise && !received_.empty()) handlers_.on_noise(received_);
  if (count <= 0) return fail_with(count == 0 ? "its connection was closed" : errno_text(errno));
  heard_ = Clock::now();
  received_.append(bytes.data(), static_cast<std::size_t>(count));
  take_words();
}

void Link::take_words() {
  if (!greeted_) {
    const std::size_t begin = received_.find(kGreeting);
    // Of what is no greeting the last line may become one.
    const std::size_t noise = begin != std::string::npos ? begin : received_.rfind('\n', received_.size() - 1);
    if (noise != std::string::npos && noise > 0) {
      if (handlers_.on_noise) handlers_.on_noise(received_.substr(0, noise));
      received_.erase(0, noise);
    }
    if (begin == std::string::npos) {
      if (received_.size() > kMostBytesOfWord) fail_with("whoever is there is no launcher");
      return;
    }
    received_.erase(0, kGreeting.size());
    greeted_ = true;
  }
  while (in_ && received_.size() >= kHeader) {
    std::uint32_t length = 0;
    for (std::size_t i = 0; i < sizeof length; ++i) {
      length |= std::uint32_t{static_cast<unsigned char>(received_[1 + i])} << 8 * i;
    }
    if (length > kMostBytesOfWord) return fail_with("what it says makes no sense");
    if (received_.size() < kHeader + length) return;
    const auto word = static_cast<Word>(received_[0]);
    const std::string body = received_.substr(kHeader, length);
    received_.erase(0, kHeader + length);
    if (word != Word::ping) handlers_.on_word(word, body);
  }
}

}  // namespace deep_ep::tools
