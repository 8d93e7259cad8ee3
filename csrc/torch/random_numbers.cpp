#include "random_numbers.h"

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstring>
#include <typeinfo>

namespace fastpipe {

namespace {

bool same(const std::vector<at::Tensor>& first, const std::vector<at::Tensor>& second) {
  return std::equal(first.begin(), first.end(), second.begin(), second.end(), [](const auto& a, const auto& b) {
    return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
  });
}

// Whether its backward is a function of Python's, which may run anything. By name: torch does not export the type.
bool is_python(const torch::autograd::Node& node) {
  if (std::strstr(typeid(node).name(), "PyNode") == nullptr) return false;
  return node.name() != "AddedLossBackward";  // of fastpipe/runtime/added_losses.py, and recomputes nothing
}

}  // namespace

namespace {
thread_local bool holds_generators = false;
}  // namespace

void GeneratorsMutex::lock() {
  mutex_.lock();
  holds_generators = true;
}

void GeneratorsMutex::unlock() {
  holds_generators = false;
  mutex_.unlock();
}

bool GeneratorsMutex::held_here() {
  return holds_generators;
}

GeneratorsMutex& generators_mutex() {
  static GeneratorsMutex mutex;
  return mutex;
}

std::uint64_t microbatch_seed(std::uint64_t seed, std::int64_t step, std::int32_t stage, std::int32_t microbatch) {
  for (const std::uint64_t number :
       {static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(stage), static_cast<std::uint64_t>(microbatch)}) {
    seed += 0x9E3779B97F4A7C15ULL * (number + 1);
    seed = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9ULL;
    seed = (seed ^ (seed >> 27)) * 0x94D049BB133111EBULL;
    seed ^= seed >> 31;
  }
  return seed;
}

Generators::Generators(const at::Device& device, std::optional<std::uint64_t> seed) : seed_(seed) {
  generators_.push_back(at::globalContext().defaultGenerator(at::kCPU));
  if (!device.is_cpu()) generators_.push_back(at::globalContext().defaultGenerator(device));
}

void Generators::begin(std::int64_t step) {
  step_ = step;
  moved_elsewhere_ = false;
  expected_ = states();
}

bool Generators::end() const {
  return moved_elsewhere_ || !same(states(), expected_);
}

Generators::States Generators::states() const {
  States found;
  for (at::Generator generator : generators_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    found.push_back(generator.get_state());
  }
  return found;
}

void Generators::restore(const States& states) {
  for (std::size_t i = 0; i < generators_.size(); ++i) {
    const std::lock_guard<std::mutex> lock(generators_[i].mutex());
    generators_[i].set_state(states[i]);
  }
}

void Generators::seed(std::int32_t stage, std::int32_t microbatch) {
  for (at::Generator& generator : generators_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(microbatch_seed(*seed_, step_, stage, microbatch));
  }
}

void StageRandom::note_graph(const torch::autograd::edge_list& roots) {
  std::vector<torch::autograd::Node*> stack;
  for (const auto& root : roots) stack.push_back(root.function.get());
  ska::flat_hash_set<torch::autograd::Node*> seen;
  while (!stack.empty() && !recomputed) {
    torch::autograd::Node* const node = stack.back();
    stack.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    recomputed = is_python(*node);
    for (const auto& edge : node->next_edges()) stack.push_back(edge.function.get());
  }
}

RandomRegion::RandomRegion(StageRandom* random, Kind kind, std::int32_t microbatch) : random_(random), kind_(kind) {
  if (random == nullptr) return;
  if (kind == Kind::kForward ? random->guards_forward : random->guards_backward) enter(microbatch);
  sequence_ = at::sequence_number::peek();
}

void RandomRegion::enter(std::int32_t microbatch) {
  Generators& generators = *random_->generators;
  lock_ = std::unique_lock<GeneratorsMutex>(generators_mutex());
  before_ = generators.states();
  if (!same(before_, generators.expected_)) generators.moved_elsewhere_ = true;
  if (generators.seed_) generators.seed(random_->stage, microbatch);
  if (random_->watches) start_ = generators.states();
}

RandomRegion::~RandomRegion() {
  if (random_ == nullptr) return;
  // A backward makes no nodes of autograd, but for those of what it recomputes. W has one that starts it.
  if (kind_ == Kind::kBackward && at::sequence_number::peek() != sequence_) random_->recomputed = true;
  if (!lock_) return;
  Generators& generators = *random_->generators;
  if (random_->watches && !same(start_, generators.states())) {
    random_->drew = true;
    if (kind_ != Kind::kForward) random_->recomputed = true;
  }
  if (generators.seed_) generators.restore(before_);
  generators.expected_ = generators.seed_ ? std::move(before_) : generators.states();
}

}  // namespace fastpipe
