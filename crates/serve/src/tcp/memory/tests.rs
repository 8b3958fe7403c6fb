//! Order of the wait queue, and caches that keep nothing while others wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_dma::RegionTable;
use tenmil_nvme_controller::controller::WakeFn;

use super::{BufferCache, BufferPool, Standing};

const LARGEST: u32 = 64 << 10;

/// Cache, and the number of its wake-ups.
fn quota(budget: &BufferPool) -> (BufferCache, Arc<AtomicU32>) {
    purse_from(budget, "here")
}

/// Cache of a connection from this address.
fn purse_from(budget: &BufferPool, address: &str) -> (BufferCache, Arc<AtomicU32>) {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let waker: WakeFn = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    (BufferCache::new(budget, address, waker).unwrap(), calls)
}

#[test]
fn whoever_is_first_in_line_is_called_when_memory_comes_back() {
    // The reserved block and one more, in addition to the pages of four connections.
    let bytes = u64::from(2 * LARGEST + 4 * 8192);
    let budget = BufferPool::new(&RegionTable::new(2), bytes, LARGEST, 4).unwrap();
    let purses = ["one", "two", "three", "four"].map(|address| purse_from(&budget, address));
    let [(mut one, _), (mut two, second), (mut three, third), (mut four, _)] = purses;
    let first = one.take(LARGEST).unwrap();
    let kept = four.take(LARGEST).unwrap();
    assert!(two.take(4096).is_none() && three.take(4096).is_none());
    let called = || (second.load(Ordering::Relaxed), third.load(Ordering::Relaxed));
    assert_eq!((budget.waiting(), called()), (2, (0, 0)));
    one.release(first);
    assert_eq!(called(), (1, 0), "nobody but the first");
    assert!(three.take(4096).is_none(), "it is not its turn");
    let small = two.take(4096).unwrap();
    assert_eq!(called(), (1, 1), "now it is");
    let other = three.take(4096).unwrap();
    assert_eq!(budget.waiting(), 0);
    four.release(kept);
    two.release(small);
    three.release(other);
    drop((one, two, three, four));
    assert_eq!(budget.free_bytes(), budget.bytes());
}

/// No segment reaches beyond its buffer, whatever length is requested.
#[test]
fn no_part_of_a_buffer_ends_behind_it() {
    let budget = budget_of(2);
    let (mut quota, _) = quota(&budget);
    for len in [4096, 8192, LARGEST] {
        let buffer = quota.take(len).unwrap();
        assert_eq!(buffer.len_bytes(), u64::from(len));
        for (asked, is_there) in [(1, true), (len, true), (len + 1, false), (u32::MAX, false)] {
            assert_eq!(buffer.segment(&budget, asked).is_some(), is_there, "{asked} of {len}");
        }
    }
    let halves = quota.take_own(8192).unwrap().split().unwrap();
    assert!(halves.iter().all(|half| half.segment(&budget, 4097).is_none()));
}

#[test]
fn a_connection_that_goes_while_it_waits_holds_up_nobody() {
    let budget = budget_of(2);
    let purses = ["one", "two", "three", "four"].map(|address| purse_from(&budget, address));
    let [(mut one, _), (mut two, _), (mut three, third), (mut four, _)] = purses;
    let held = [one.take(LARGEST).unwrap(), four.take(LARGEST).unwrap()];
    assert!(two.take(LARGEST).is_none() && three.take(LARGEST).is_none());
    drop(two);
    assert_eq!((budget.waiting(), third.load(Ordering::Relaxed)), (1, 0));
    held.into_iter().for_each(|buffer| one.release(buffer));
    assert!(three.take(LARGEST).is_some());
}

/// The right to own pages does not reserve particular pages: they are shared, and the most recently
/// used ones are used again.
#[test]
fn the_right_to_pages_is_everybodys_and_the_pages_are_those_used_last() {
    let bytes = u64::from(LARGEST + 3 * 8192);
    let budget = BufferPool::new(&RegionTable::new(2), bytes, LARGEST, 3).unwrap();
    let [(mut one, _), (mut two, _), (mut three, _)] = [0; 3].map(|_| quota(&budget));
    assert!(BufferCache::new(&budget, "here", Arc::new(|| {})).is_none(), "there are three");
    let first = one.take_own(8192).unwrap();
    assert!(!one.has_own() && one.take_own(1).is_none() && two.has_own());
    let place = first.segment(&budget, 1).unwrap();
    one.release(first);
    let again = two.take_own(4096).unwrap();
    assert_eq!(again.segment(&budget, 1), Some(place));
    // All at the same time, and all different.
    let held = [again, one.take_own(1).unwrap(), three.take_own(1).unwrap()];
    let mut offsets = held.each_ref().map(|buffer| buffer.segment(&budget, 1).unwrap().offset);
    offsets.sort_unstable();
    assert!(offsets.is_sorted_by(|one, other| one + 8192 <= *other), "{offsets:?}");
    assert!(offsets.iter().all(|offset| offset.is_multiple_of(8192)), "{offsets:?}");
    let [again, second, third] = held;
    two.release(again);
    one.release(second);
    three.release(third);
    drop(three);
    let next = quota(&budget);
    drop((one, two, next));
    assert_eq!(budget.free_bytes(), budget.bytes());
}

/// The pairs of pages overlap neither each other nor the blocks.
#[test]
fn own_pages_lie_behind_the_blocks() {
    for odd in [0, 4096] {
        let bytes = u64::from(LARGEST + 3 * 8192 + odd);
        let budget = BufferPool::new(&RegionTable::new(2), bytes, LARGEST, 3).unwrap();
        assert_eq!(budget.bytes(), bytes - u64::from(odd), "a page is of no use");
        let mut purses = [0; 3].map(|_| quota(&budget).0);
        let own = purses.each_mut().map(|quota| quota.take_own(1).unwrap());
        let whole = purses[0].take(LARGEST).unwrap();
        let begin = |buffer: &super::Buffer| buffer.segment(&budget, 1).unwrap().offset;
        let mut all: Vec<_> = own.iter().map(|buffer| (begin(buffer), 8192)).collect();
        all.push((begin(&whole), u64::from(LARGEST)));
        all.sort_unstable();
        assert!(all.is_sorted_by(|one, other| one.0 + one.1 <= other.0), "{all:?}");
    }
}

/// Cache of a host at an address.
fn purse_of(budget: &BufferPool, host: &str, address: &str) -> BufferCache {
    let (quota, _) = purse_from(budget, address);
    quota.bind(host, Standing::new(false, false));
    quota
}

/// Allocates blocks until the cache gets none.
fn take_all(quota: &mut BufferCache, len_bytes: u32) -> Vec<super::Buffer> {
    std::iter::from_fn(|| quota.take(len_bytes)).collect()
}

/// Memory for `blocks` of the largest blocks, one of them reserved, and eight connections.
fn budget_of(blocks: u32) -> BufferPool {
    let bytes = u64::from(blocks * LARGEST + 8 * 8192);
    BufferPool::new(&RegionTable::new(2), bytes, LARGEST, 8).unwrap()
}

#[test]
fn no_host_has_more_than_it_leaves_to_others() {
    let budget = budget_of(17);
    // Whatever the size of the requests and the number of connections.
    for len_bytes in [4096, 8192, LARGEST] {
        let mut purses = [0; 3].map(|_| purse_of(&budget, "greedy", "one"));
        let held: Vec<_> = purses.iter_mut().flat_map(|quota| take_all(quota, len_bytes)).collect();
        let bytes: u64 = held.iter().map(super::Buffer::len_bytes).sum();
        let half = u64::from(8 * LARGEST);
        assert!(bytes <= half + u64::from(LARGEST), "{bytes} of twice {half}");
        assert!(bytes >= half - 3 * (128 << 10), "{bytes} of twice {half}");
        let mut other = purse_of(&budget, "other", "two");
        assert!(take_all(&mut other, LARGEST).len() >= 3, "there is some for another");
        drop(held);
    }
    assert_eq!(budget.state().ledger.len(), 0);
    assert_eq!((budget.free_bytes(), budget.waiting()), (budget.bytes(), 0));
}

#[test]
fn hosts_of_one_address_leave_some_to_others() {
    let budget = budget_of(17);
    let mut purses = [0, 1, 2, 3, 4, 5].map(|at| purse_of(&budget, &at.to_string(), "one"));
    let held: Vec<_> = purses.iter_mut().flat_map(|quota| take_all(quota, LARGEST)).collect();
    assert!(held.len() >= 10, "{}", held.len());
    let mut other = purse_of(&budget, "other", "two");
    assert!(!take_all(&mut other, LARGEST).is_empty(), "{} are out", held.len());
}

#[test]
fn the_block_that_is_kept_back_is_for_a_host_that_has_nothing() {
    let budget = budget_of(2);
    let [mut one, mut two] = [0; 2].map(|_| purse_of(&budget, "one", "there"));
    let mut other = purse_of(&budget, "other", "there");
    let held = one.take(LARGEST).unwrap();
    assert!(two.take(LARGEST).is_none() && one.take(4096).is_none(), "it has something");
    let kept = other.take(LARGEST).unwrap();
    drop(kept);
    let kept = other.take(LARGEST).unwrap();
    drop(held);
    // Among the connections of one host, the oldest waiting one is served first, whatever another
    // one requests.
    assert!(one.take(4096).is_none());
    let first = two.take(LARGEST).unwrap();
    drop((first, kept));
    assert!(one.take(4096).is_some());
}

/// NQNs can be invented, and addresses are many: what is reserved is not had by them, nor by one that
/// has the NQN of a named host where any host may connect.
#[test]
fn memory_is_reserved_for_hosts_that_a_subsystem_names() {
    for reserves in [false, true] {
        let budget = budget_of(17);
        let others = [
            ("a", "one"),
            ("named", "one"),
            ("c", "two"),
            ("d", "two"),
            ("e", "three"),
            ("f", "three"),
        ];
        let mut others = others.map(|(host, address)| {
            let (quota, _) = purse_from(&budget, address);
            quota.bind(host, Standing::new(false, reserves));
            quota
        });
        let held: Vec<_> = others.iter_mut().flat_map(|quota| take_all(quota, LARGEST)).collect();
        let (mut named, _) = purse_from(&budget, "one");
        named.bind("named", Standing::new(true, true));
        let got = take_all(&mut named, LARGEST);
        assert_eq!(!got.is_empty(), reserves, "{} are out", held.len());
        drop((got, held, others, named));
        assert_eq!(budget.state().ledger.len(), 0);
        assert_eq!((budget.free_bytes(), budget.waiting()), (budget.bytes(), 0));
    }
}

#[test]
fn a_named_host_comes_before_those_that_waited_longer() {
    let budget = budget_of(2);
    let [(mut one, _), (mut two, _), (mut named, called)] = ["1", "2", "3"].map(|it| {
        let (quota, called) = purse_from(&budget, it);
        quota.bind(it, Standing::new(it == "3", true));
        (quota, called)
    });
    let held = one.take(LARGEST).unwrap();
    let other = named.take(LARGEST).unwrap();
    assert!(two.take(LARGEST).is_none() && named.take(LARGEST).is_none());
    drop((other, held));
    assert_ne!(called.load(Ordering::Relaxed), 0);
    assert!(two.take(LARGEST).is_none(), "it is not its turn");
    assert!(named.take(LARGEST).is_some());
    assert!(two.take(LARGEST).is_some());
}
