#include "tasks.h"

#include <string>

#include "reduce.h"

namespace hpdl {

namespace {

class InMemory : public Part {
  public:
    InMemory(ShmGroup& group, const Buffer& x) : group_(group), x_(x) {}
    Operation& begin() override {
        group_.start_all_reduce(x_);
        return group_;
    }
    bool uses_mpi() const override { return false; }
    std::vector<Call> calls() const override { return group_.calls(); }
    std::vector<int> missing() const override { return group_.missing(); }

  private:
    ShmGroup& group_;
    Buffer x_;
};

class Agreeing : public Part {
  public:
    Agreeing(const Group& group, const Call& call) : agreement_(group, call, "") {}
    Operation& begin() override { return agreement_; }
    bool uses_mpi() const override { return true; }
    std::vector<Call> calls() const override { return agreement_.calls(); }

  private:
    Agreement agreement_;
};

class AroundTheRing : public Part {
  public:
    AroundTheRing(const Group& group, const Buffer& x, std::size_t segment, bool traced)
        : group_(group), x_(x), segment_(segment), traced_(traced) {}
    Operation& begin() override {  // not earlier: the task before this one may write to x
        ring_ = std::make_unique<Ring>(group_, x_, segment_, traced_);
        return *ring_;
    }
    bool uses_mpi() const override { return true; }

  private:
    Group group_;
    Buffer x_;
    std::size_t segment_;
    bool traced_;
    std::unique_ptr<Ring> ring_;
};

}  // namespace

Parts all_reduce_in_memory(ShmGroup& group, const Buffer& x) {
    require_aligned(x, "all_reduce");
    Parts parts;
    parts.push_back(std::make_unique<InMemory>(group, x));
    return parts;
}

Parts all_reduce_by_messages(const Group& group, const Call& call, const Buffer& x, std::size_t segment, bool traced) {
    require_aligned(x, "all_reduce");
    Parts parts;
    parts.push_back(std::make_unique<Agreeing>(group, call));
    parts.push_back(std::make_unique<AroundTheRing>(group, x, segment, traced));
    return parts;
}

const Ring* ring_of(const Task& task) { return dynamic_cast<const Ring*>(task.last()); }

}  // namespace hpdl
