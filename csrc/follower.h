// A schedule followed message by message, in the order in which messages become ready: what
// hpdl_lab/collectives/overtaking.py does, for hundreds of millions of messages. Times are virtual seconds.
//
//     add(round)   ranks that had nothing to do post it; messages are booked until some rank has nothing to do again
//     end()        there are no more rounds: the rest is booked
//
// Only rounds that some rank has not yet passed are held.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

namespace hpdl {

// Who sends to whom in a round, and what each message meets on its way: comm/network/links.py. Many rounds share one.
struct Pattern {
    // Columns of `count` values. links: the sender's port, what is between (-1: nothing), the receiver's port.
    // Throws std::invalid_argument for a route without two ports and for numbers beyond 2^31.
    Pattern(std::size_t count, const std::int64_t* source, const std::int64_t* dest, const double* alpha,
            const std::vector<const std::int64_t*>& columns);

    struct Way {
        std::int32_t source, dest;
        double alpha;  // s
    };
    std::size_t width;  // links of each message
    std::vector<Way> ways;
    std::vector<std::int32_t> links;         // `width` for each message
    std::int32_t ranks = 0, most_links = 0;  // the least numbers of ranks and of links that there must be
};

class Follower {
  public:
    // clocks: when each rank begins, s; none of the links is in use.
    Follower(std::vector<double> clocks, std::int64_t links);

    // The next round. seconds: what the bytes of each message alone take; eager: whether its send ends at once; null:
    // none does. Throws std::invalid_argument for ranks or links that are not there, and where a message takes no time.
    void add(std::shared_ptr<const Pattern> pattern, const double* seconds, const bool* eager);
    void end();

    const std::vector<double>& clocks() const { return clocks_; }  // when each rank has ended, or how far it is
    std::size_t held() const { return held_; }                     // messages in memory

  private:
    struct Message {
        double when = 0.0;       // when the end that was first there posted it; of an eager message, its arrival
        std::uint32_t post = 0;  // the number of that end's post
        bool eager = false, posted = false, arrived = false;
    };
    struct Round {
        std::shared_ptr<const Pattern> pattern;
        std::vector<double> seconds;
        std::vector<Message> messages;
        std::size_t left = 0;  // messages that are not over
    };
    struct Post {
        std::uint32_t round, row;
        bool receives;
    };
    struct Rank {
        std::vector<Post> todo;  // from `next` on
        std::size_t next = 0;
        std::uint32_t posts = 0;  // so far
        std::int32_t open = 0;    // messages for which it waits
        bool idle() const { return next == todo.size() && open == 0; }
    };
    struct Ready {
        std::uint64_t who;  // of the end that came later: messages of one time are booked in this order
        std::uint32_t round, row;
    };

    // Ends of messages in the order of ranks, and of a rank's own posts.
    static std::uint64_t who(std::int32_t rank, std::uint32_t post) {
        return static_cast<std::uint64_t>(rank) << 32 | post;
    }

    void post(std::int32_t rank, Post post, std::vector<std::int32_t>* woken);
    void begin(std::int32_t rank);
    void begin_post(std::int32_t rank, double now, const Post& post);
    void push(double when, Ready ready);
    void advance();
    void book(double now, const Ready& ready);
    void finish(std::int32_t rank, double end);
    void over(std::uint32_t round);

    std::vector<double> clocks_, free_;  // free_: when each link is
    std::vector<Rank> ranks_;
    std::deque<Round> rounds_;
    std::uint32_t first_ = 0;  // the number of rounds_[0]
    std::size_t held_ = 0, idle_;
    bool ended_ = false;
    std::map<double, std::vector<Ready>> ready_;  // by the time when they became ready: as a rule many at a time
    std::map<double, std::vector<Ready>>::iterator last_ = ready_.end();  // where push was last
    std::vector<std::vector<Ready>> spare_;                               // memory of those that are booked
    std::vector<Round> spare_rounds_;
};

}  // namespace hpdl
