#include "follower.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace hpdl {

namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 1;

std::int32_t number(std::int64_t value, std::int64_t least, const char* what) {
    if (value >= least && value <= kMost) return static_cast<std::int32_t>(value);
    throw std::invalid_argument(std::string("there is no ") + what + " " + std::to_string(value));
}

}  // namespace

Pattern::Pattern(std::size_t count, const std::int64_t* source, const std::int64_t* dest, const double* alpha,
                 const std::vector<const std::int64_t*>& columns)
    : width(columns.size()) {
    if (width < 2) throw std::invalid_argument("a route has a first and a last link");
    ways.resize(count);
    links.resize(count * width);
    for (std::size_t t = 0; t < count; t++) {
        ways[t] = {number(source[t], 0, "rank"), number(dest[t], 0, "rank"), alpha[t]};
        if (source[t] == dest[t]) throw std::invalid_argument("a rank sends to itself");
        ranks = std::max({ranks, ways[t].source + 1, ways[t].dest + 1});
    }
    for (std::size_t i = 0; i < width; i++) {
        const std::int64_t least = i == 0 || i + 1 == width ? 0 : -1;
        for (std::size_t t = 0; t < count; t++) {
            const std::int32_t link = number(columns[i][t], least, "link");
            links[t * width + i] = link;
            most_links = std::max(most_links, link + 1);
        }
    }
}

Follower::Follower(std::vector<double> clocks, std::int64_t links) : clocks_(std::move(clocks)) {
    free_.assign(number(links, 0, "network with links:"), 0.0);
    number(static_cast<std::int64_t>(clocks_.size()), 1, "group of ranks of size");
    for (double clock : clocks_)
        if (!(clock >= 0))
            throw std::invalid_argument("a rank begins at a time that is none: " + std::to_string(clock));
    ranks_.resize(clocks_.size());
    idle_ = ranks_.size();
}

void Follower::add(std::shared_ptr<const Pattern> pattern, const double* seconds, const bool* eager) {
    if (ended_) throw std::invalid_argument("a round after the last one");
    const std::size_t count = pattern->ways.size();
    if (pattern->ranks > static_cast<std::int64_t>(ranks_.size()) ||
        pattern->most_links > static_cast<std::int64_t>(free_.size()))
        throw std::invalid_argument("a round of " + std::to_string(pattern->ranks) + " ranks and " +
                                    std::to_string(pattern->most_links) + " links: there are fewer");
    if (count == 0) return;
    Round round;
    if (!spare_rounds_.empty()) {
        round = std::move(spare_rounds_.back());
        spare_rounds_.pop_back();
    }
    round.left = count;
    round.seconds.assign(seconds, seconds + count);
    round.messages.assign(count, Message());
    if (eager)
        for (std::size_t t = 0; t < count; t++) round.messages[t].eager = eager[t];
    round.pattern = std::move(pattern);
    const std::vector<Pattern::Way>& ways = round.pattern->ways;  // stays where it is
    const std::uint32_t nth = first_ + static_cast<std::uint32_t>(rounds_.size());
    rounds_.push_back(std::move(round));
    held_ += count;
    std::vector<std::int32_t> woken;
    // A rank posts its receives, then its sends, each in the order of the rows.
    for (std::uint32_t t = 0; t < count; t++) post(ways[t].dest, {nth, t, true}, &woken);
    for (std::uint32_t t = 0; t < count; t++) post(ways[t].source, {nth, t, false}, &woken);
    for (std::int32_t rank : woken) begin(rank);
    advance();
}

void Follower::end() {
    ended_ = true;
    advance();
}

void Follower::post(std::int32_t rank, Post post, std::vector<std::int32_t>* woken) {
    Rank& mine = ranks_[rank];
    if (mine.idle()) {
        idle_--;
        woken->push_back(rank);
    }
    if (mine.next > 16 && 2 * mine.next > mine.todo.size()) {  // a rank that lags behind may never have an empty list
        mine.todo.erase(mine.todo.begin(), mine.todo.begin() + static_cast<std::ptrdiff_t>(mine.next));
        mine.next = 0;
    }
    mine.todo.push_back(post);
}

// Let `rank` post its next round, and all that follow as long as it need not wait.
void Follower::begin(std::int32_t rank) {
    Rank& mine = ranks_[rank];
    while (mine.open == 0 && mine.next < mine.todo.size()) {
        const double now = clocks_[rank];
        const std::uint32_t round = mine.todo[mine.next].round;
        while (mine.next < mine.todo.size() && mine.todo[mine.next].round == round)
            begin_post(rank, now, mine.todo[mine.next++]);
    }
    if (mine.next == mine.todo.size()) {
        mine.todo.clear();
        mine.next = 0;
    }
    if (mine.idle()) idle_++;
}

void Follower::begin_post(std::int32_t rank, double now, const Post& post) {
    Rank& mine = ranks_[rank];
    Round& round = rounds_[post.round - first_];
    Message& message = round.messages[post.row];
    mine.posts++;
    if (!message.eager) {
        mine.open++;
        if (!message.posted) {
            message.posted = true;
            message.when = now;
            message.post = mine.posts;
        } else {
            const Pattern::Way& way = round.pattern->ways[post.row];
            const std::uint64_t theirs = who(post.receives ? way.source : way.dest, message.post);
            const auto later = std::max(std::pair(now, who(rank, mine.posts)), std::pair(message.when, theirs));
            push(later.first, {later.second, post.round, post.row});
        }
    } else if (!post.receives) {
        push(now, {who(rank, mine.posts), post.round, post.row});
    } else if (!message.arrived) {
        message.posted = true;
        mine.open++;
    } else {
        clocks_[rank] = std::max(clocks_[rank], message.when);
        over(post.round);
    }
}

void Follower::push(double when, Ready ready) {
    if (last_ == ready_.end() || last_->first != when) {
        bool fresh;
        std::tie(last_, fresh) = ready_.try_emplace(when);
        if (fresh && !spare_.empty()) {
            last_->second = std::move(spare_.back());
            spare_.pop_back();
        }
    }
    last_->second.push_back(ready);
}

// Book what is ready while every rank has something to do, since another round may bring what is ready earlier.
void Follower::advance() {
    while (!ready_.empty() && (idle_ == 0 || ended_)) {
        const auto first = ready_.begin();
        const double now = first->first;
        std::vector<Ready> group = std::move(first->second);
        if (last_ == first) last_ = ready_.end();
        ready_.erase(first);
        std::stable_sort(group.begin(), group.end(), [](const Ready& a, const Ready& b) { return a.who < b.who; });
        for (const Ready& ready : group) book(now, ready);  // what becomes ready by that is ready later
        group.clear();
        spare_.push_back(std::move(group));
        while (!rounds_.empty() && rounds_.front().left == 0) {
            held_ -= rounds_.front().messages.size();
            rounds_.front().pattern.reset();
            spare_rounds_.push_back(std::move(rounds_.front()));
            rounds_.pop_front();
            first_++;
        }
    }
}

// The additions of Timetable.book in comm/network/links.py, in the same order.
void Follower::book(double now, const Ready& ready) {
    Round& round = rounds_[ready.round - first_];
    Message& message = round.messages[ready.row];
    const Pattern& pattern = *round.pattern;
    const auto [source, dest, alpha] = pattern.ways[ready.row];
    const double seconds = round.seconds[ready.row];
    const std::int32_t *first = &pattern.links[ready.row * pattern.width], *last = first + pattern.width - 1;
    double start = now;
    for (const std::int32_t* link = first; link <= last; link++)
        if (*link >= 0) start = std::max(start, free_[*link]);
    const double end = start + alpha + seconds;
    if (!(end > now)) throw std::invalid_argument("messages that take no time have no order in which to share links");
    for (const std::int32_t* link = first + 1; link < last; link++)
        if (*link >= 0) free_[*link] = start + seconds;
    free_[*first] = free_[*last] = end;
    if (!message.eager) {
        over(ready.round);
        finish(source, end);
        finish(dest, end);
    } else if (message.posted) {
        over(ready.round);
        finish(dest, end);
    } else {
        message.arrived = true;
        message.when = end;
    }
}

void Follower::finish(std::int32_t rank, double end) {
    clocks_[rank] = std::max(clocks_[rank], end);
    if (--ranks_[rank].open == 0) begin(rank);
}

void Follower::over(std::uint32_t round) { rounds_[round - first_].left--; }

}  // namespace hpdl
