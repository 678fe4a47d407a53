// What the progress thread can do for a rank that computes.
#pragma once

#include <memory>
#include <vector>

#include "progress.h"
#include "ring.h"
#include "shm_group.h"

namespace hpdl {

using Parts = std::vector<std::unique_ptr<Part>>;

// x becomes the sum over the ranks of `group`, which must live as long as the task. Throws std::invalid_argument.
Parts all_reduce_in_memory(ShmGroup& group, const Buffer& x);

// The same by messages, once all ranks have agreed on `call`; arguments of Ring.
Parts all_reduce_by_messages(const Group& group, const Call& call, const Buffer& x, std::size_t segment, bool traced);

// The ring of such a task, once it has begun; null where there is none.
const Ring* ring_of(const Task& task);

}  // namespace hpdl
