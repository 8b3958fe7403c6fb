//! Order of the wait queue, and caches that keep nothing while others wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_dma::RegionTable;
use tenmil_nvme_controller::controller::WakeFn;

use super::{BufferCache, BufferPool, HostClass, HostMemory};

const LARGEST: u32 = 64 << 10;

/// Cache, and the number of its wake-ups.
fn cache_of_new_connection(pool: &BufferPool) -> (BufferCache, Arc<AtomicU32>) {
    cache_from_address(pool, "here")
}

/// Cache of a connection from this address.
fn cache_from_address(pool: &BufferPool, address: &str) -> (BufferCache, Arc<AtomicU32>) {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let waker: WakeFn = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    (BufferCache::new(pool, address, waker).unwrap(), calls)
}

/// A host without a limit of its own.
fn unlimited(name: &str, class: HostClass) -> HostMemory<'_> {
    HostMemory { name, class, bytes_max: None }
}

#[test]
fn freed_memory_wakes_the_first_waiter() {
    // The reserved block and one more, in addition to the pages of four connections.
    let bytes = u64::from(2 * LARGEST + 4 * 8192);
    let pool = BufferPool::new(&RegionTable::new(2), bytes, LARGEST, 4).unwrap();
    let caches = ["one", "two", "three", "four"].map(|address| cache_from_address(&pool, address));
    let [(mut one, _), (mut two, second), (mut three, third), (mut four, _)] = caches;
    let first = one.allocate(LARGEST).unwrap();
    let reserve = four.allocate(LARGEST).unwrap();
    assert!(two.allocate(4096).is_none() && three.allocate(4096).is_none());
    let called = || (second.load(Ordering::Relaxed), third.load(Ordering::Relaxed));
    assert_eq!((pool.waiting_connections(), called()), (2, (0, 0)));
    one.release_buffer(first);
    assert_eq!(called(), (1, 0), "only the first waiting connection is woken");
    assert!(three.allocate(4096).is_none(), "it is not its turn");
    let small = two.allocate(4096).unwrap();
    assert_eq!(called(), (1, 1), "now it is");
    let other = three.allocate(4096).unwrap();
    assert_eq!(pool.waiting_connections(), 0);
    four.release_buffer(reserve);
    two.release_buffer(small);
    three.release_buffer(other);
    drop((one, two, three, four));
    assert_eq!(pool.free_bytes(), pool.size_bytes());
}

/// No segment reaches beyond its buffer, whatever length is requested.
#[test]
fn no_buffer_segment_exceeds_its_block() {
    let pool = pool_of_blocks(2);
    let (mut cache, _) = cache_of_new_connection(&pool);
    for len in [4096, 8192, LARGEST] {
        let buffer = cache.allocate(len).unwrap();
        assert_eq!(buffer.len_bytes(), u64::from(len));
        for (asked, is_there) in [(1, true), (len, true), (len + 1, false), (u32::MAX, false)] {
            assert_eq!(buffer.segment(&pool, asked).is_some(), is_there, "{asked} of {len}");
        }
    }
    let halves = cache.allocate_own_pages(8192).unwrap().split_pages().unwrap();
    assert!(halves.iter().all(|half| half.segment(&pool, 4097).is_none()));
}

#[test]
fn closing_a_waiting_connection_removes_it_from_the_wait_queue() {
    let pool = pool_of_blocks(2);
    let caches = ["one", "two", "three", "four"].map(|address| cache_from_address(&pool, address));
    let [(mut one, _), (mut two, _), (mut three, third), (mut four, _)] = caches;
    let held = [one.allocate(LARGEST).unwrap(), four.allocate(LARGEST).unwrap()];
    assert!(two.allocate(LARGEST).is_none() && three.allocate(LARGEST).is_none());
    drop(two);
    assert_eq!((pool.waiting_connections(), third.load(Ordering::Relaxed)), (1, 0));
    held.into_iter().for_each(|buffer| one.release_buffer(buffer));
    assert!(three.allocate(LARGEST).is_some());
}

/// The right to own pages does not reserve particular pages: they are shared, and the most recently
/// used ones are used again.
#[test]
fn every_connection_gets_own_pages_least_recently_freed_last() {
    let bytes = u64::from(LARGEST + 3 * 8192);
    let pool = BufferPool::new(&RegionTable::new(2), bytes, LARGEST, 3).unwrap();
    let [(mut one, _), (mut two, _), (mut three, _)] =
        [0; 3].map(|_| cache_of_new_connection(&pool));
    assert!(BufferCache::new(&pool, "here", Arc::new(|| {})).is_none(), "there are three");
    let first = one.allocate_own_pages(8192).unwrap();
    assert!(
        !one.has_free_own_pages()
            && one.allocate_own_pages(1).is_none()
            && two.has_free_own_pages()
    );
    let place = first.segment(&pool, 1).unwrap();
    one.release_buffer(first);
    let again = two.allocate_own_pages(4096).unwrap();
    assert_eq!(again.segment(&pool, 1), Some(place));
    // All at the same time, and all different.
    let held = [again, one.allocate_own_pages(1).unwrap(), three.allocate_own_pages(1).unwrap()];
    let mut offsets = held.each_ref().map(|buffer| buffer.segment(&pool, 1).unwrap().offset);
    offsets.sort_unstable();
    assert!(offsets.is_sorted_by(|one, other| one + 8192 <= *other), "{offsets:?}");
    assert!(offsets.iter().all(|offset| offset.is_multiple_of(8192)), "{offsets:?}");
    let [again, second, third] = held;
    two.release_buffer(again);
    one.release_buffer(second);
    three.release_buffer(third);
    drop(three);
    let next = cache_of_new_connection(&pool);
    drop((one, two, next));
    assert_eq!(pool.free_bytes(), pool.size_bytes());
}

/// The pairs of pages overlap neither each other nor the blocks.
#[test]
fn own_pages_follow_the_shared_blocks() {
    for odd in [0, 4096] {
        let bytes = u64::from(LARGEST + 3 * 8192 + odd);
        let pool = BufferPool::new(&RegionTable::new(2), bytes, LARGEST, 3).unwrap();
        assert_eq!(pool.size_bytes(), bytes - u64::from(odd), "a page is of no use");
        let mut caches = [0; 3].map(|_| cache_of_new_connection(&pool).0);
        let own = caches.each_mut().map(|cache| cache.allocate_own_pages(1).unwrap());
        let segment = caches[0].allocate(LARGEST).unwrap();
        let begin = |buffer: &super::Buffer| buffer.segment(&pool, 1).unwrap().offset;
        let mut all: Vec<_> = own.iter().map(|buffer| (begin(buffer), 8192)).collect();
        all.push((begin(&segment), u64::from(LARGEST)));
        all.sort_unstable();
        assert!(all.is_sorted_by(|one, other| one.0 + one.1 <= other.0), "{all:?}");
    }
}

/// Cache of a host at an address.
fn cache_of_host(pool: &BufferPool, host: &str, address: &str) -> BufferCache {
    let (cache, _) = cache_from_address(pool, address);
    cache.set_host(unlimited(host, HostClass::new(false, false)));
    cache
}

/// Allocates blocks until the cache gets none.
fn allocate_all(cache: &mut BufferCache, len_bytes: u32) -> Vec<super::Buffer> {
    std::iter::from_fn(|| cache.allocate(len_bytes)).collect()
}

/// Memory for `blocks` of the largest blocks, one of them reserved, and eight connections.
fn pool_of_blocks(blocks: u32) -> BufferPool {
    let bytes = u64::from(blocks * LARGEST + 8 * 8192);
    BufferPool::new(&RegionTable::new(2), bytes, LARGEST, 8).unwrap()
}

#[test]
fn one_host_holds_at_most_what_is_free() {
    let pool = pool_of_blocks(17);
    // Whatever the size of the requests and the number of connections.
    for len_bytes in [4096, 8192, LARGEST] {
        let mut caches = [0; 3].map(|_| cache_of_host(&pool, "greedy", "one"));
        let held: Vec<_> =
            caches.iter_mut().flat_map(|cache| allocate_all(cache, len_bytes)).collect();
        let bytes: u64 = held.iter().map(super::Buffer::len_bytes).sum();
        let half = u64::from(8 * LARGEST);
        assert!(bytes <= half + u64::from(LARGEST), "{bytes} of twice {half}");
        assert!(bytes >= half - 3 * (128 << 10), "{bytes} of twice {half}");
        let mut other = cache_of_host(&pool, "other", "two");
        assert!(allocate_all(&mut other, LARGEST).len() >= 3, "there is some for another");
        drop(held);
    }
    assert_eq!(pool.lock_state().ledger.entries_in_use(), 0);
    assert_eq!((pool.free_bytes(), pool.waiting_connections()), (pool.size_bytes(), 0));
}

#[test]
fn hosts_of_one_address_leave_memory_to_other_addresses() {
    let pool = pool_of_blocks(17);
    let mut caches = [0, 1, 2, 3, 4, 5].map(|at| cache_of_host(&pool, &at.to_string(), "one"));
    let held: Vec<_> = caches.iter_mut().flat_map(|cache| allocate_all(cache, LARGEST)).collect();
    assert!(held.len() >= 10, "{}", held.len());
    let mut other = cache_of_host(&pool, "other", "two");
    assert!(!allocate_all(&mut other, LARGEST).is_empty(), "{} are out", held.len());
}

#[test]
fn reserved_block_is_only_for_hosts_without_memory() {
    let pool = pool_of_blocks(2);
    let [mut one, mut two] = [0; 2].map(|_| cache_of_host(&pool, "one", "there"));
    let mut other = cache_of_host(&pool, "other", "there");
    let held = one.allocate(LARGEST).unwrap();
    assert!(two.allocate(LARGEST).is_none() && one.allocate(4096).is_none(), "it has something");
    let reserve = other.allocate(LARGEST).unwrap();
    drop(reserve);
    let reserve = other.allocate(LARGEST).unwrap();
    drop(held);
    // Among the connections of one host, the oldest waiting one is served first, whatever another
    // one requests.
    assert!(one.allocate(4096).is_none());
    let first = two.allocate(LARGEST).unwrap();
    drop((first, reserve));
    assert!(one.allocate(4096).is_some());
}

/// NQNs can be invented, and addresses are many: what is reserved is not had by them, nor by one that
/// has the NQN of a named host where any host may connect.
#[test]
fn memory_is_reserved_for_listed_hosts() {
    for reserves in [false, true] {
        let pool = pool_of_blocks(17);
        let others = [
            ("a", "one"),
            ("named", "one"),
            ("c", "two"),
            ("d", "two"),
            ("e", "three"),
            ("f", "three"),
        ];
        let mut others = others.map(|(host, address)| {
            let (cache, _) = cache_from_address(&pool, address);
            cache.set_host(unlimited(host, HostClass::new(false, reserves)));
            cache
        });
        let held: Vec<_> =
            others.iter_mut().flat_map(|cache| allocate_all(cache, LARGEST)).collect();
        let (mut named, _) = cache_from_address(&pool, "one");
        named.set_host(unlimited("named", HostClass::new(true, true)));
        let got = allocate_all(&mut named, LARGEST);
        assert_eq!(!got.is_empty(), reserves, "{} are out", held.len());
        drop((got, held, others, named));
        assert_eq!(pool.lock_state().ledger.entries_in_use(), 0);
        assert_eq!((pool.free_bytes(), pool.waiting_connections()), (pool.size_bytes(), 0));
    }
}

#[test]
fn listed_host_is_served_before_unlisted_hosts() {
    let pool = pool_of_blocks(2);
    let [(mut one, _), (mut two, _), (mut named, called)] = ["1", "2", "3"].map(|it| {
        let (cache, called) = cache_from_address(&pool, it);
        cache.set_host(unlimited(it, HostClass::new(it == "3", true)));
        (cache, called)
    });
    let held = one.allocate(LARGEST).unwrap();
    let other = named.allocate(LARGEST).unwrap();
    assert!(two.allocate(LARGEST).is_none() && named.allocate(LARGEST).is_none());
    drop((other, held));
    assert_ne!(called.load(Ordering::Relaxed), 0);
    assert!(two.allocate(LARGEST).is_none(), "it is not its turn");
    assert!(named.allocate(LARGEST).is_some());
    assert!(two.allocate(LARGEST).is_some());
}
