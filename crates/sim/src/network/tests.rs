use std::sync::Arc;

use tenmil_base::{Instant, Memory, RecvResult, Segment, SendSlice, Span, Stream};
use tenmil_dma::{Backing, Mapping, RegionTable};

use super::conformance::{self, Pair};
use super::{Direction, Fault, Faults, LinkOptions, Network, NetworkOptions, pair};

fn memory() -> (Arc<dyn Memory>, Segment) {
    let regions = RegionTable::new(1);
    let whole = regions.add(Mapping::new(1 << 20, Backing::Private).unwrap()).unwrap();
    (Arc::new(regions), whole)
}

fn pair_of(options: NetworkOptions) -> Pair {
    let (memory, whole) = memory();
    let (one, other, network) = pair(options, Arc::clone(&memory), Arc::clone(&memory));
    let rest = move |_: [(&mut dyn Stream, conformance::Wants); 2]| pass(&network);
    Pair { one: Box::new(one), other: Box::new(other), memory, whole, rest: Box::new(rest) }
}

/// Advances the time to the next arrival, or by a small step.
fn pass(network: &Network) {
    let (now, wake) = (network.now(), network.wake_at());
    let later = now.after(Span::from_us(100));
    network.advance(if wake > now { wake.min(later) } else { later });
}

#[test]
fn a_network_is_a_stream_like_any_other() {
    conformance::run(1, || pair_of(NetworkOptions::default()));
}

#[test]
fn a_network_that_splits_delays_and_has_little_room_is_one_too() {
    for seed in 0..3 {
        let line = LinkOptions {
            splits: true,
            room_bytes: 30_000,
            delay: Span::from_us(7),
            jitter: Span::from_us(20),
            ..LinkOptions::default()
        };
        let options = NetworkOptions {
            seed,
            there: line.clone(),
            back: line,
            inbox_bytes: 8192,
            release_lag: Span::from_us(50),
            release_jitter: Span::from_us(30),
            copied_below: 100,
        };
        conformance::run(seed, || pair_of(options.clone()));
    }
}

fn header(len_bytes: u32) -> [SendSlice; 1] {
    [SendSlice::Headers { at: 0, len_bytes }]
}

#[test]
fn memory_that_is_used_again_before_it_is_released_arrives_as_something_else() {
    let (memory, whole) = memory();
    let (mut one, mut other, network) =
        pair(NetworkOptions::default(), Arc::clone(&memory), Arc::clone(&memory));
    let part = whole.slice(0, 4).unwrap();
    memory.store(part, b"good").unwrap();
    assert_eq!(one.send(b"ab", &[SendSlice::Memory(part), header(2)[0]], false), Ok(6));
    assert_eq!(one.released_bytes(), 0);
    memory.store(part, b"evil").unwrap();
    assert_eq!(other.receive(), RecvResult::Bytes(6));
    assert_eq!(other.buffered(), b"evilab", "the headers were copied");
    network.advance(network.now());
    assert_eq!(one.released_bytes(), 6);
}

#[test]
fn release_is_told_late_and_arm_knows() {
    let lag = Span::from_us(10);
    let options = NetworkOptions { release_lag: lag, ..NetworkOptions::default() };
    let (memory, whole) = memory();
    let (mut one, mut other, network) = pair(options, Arc::clone(&memory), memory);
    let part = SendSlice::Memory(whole.slice(0, 4).unwrap());
    one.send(b"", &[part], false).unwrap();
    assert_eq!(other.receive(), RecvResult::Bytes(4));
    assert_eq!(one.released_bytes(), 0);
    assert!(!one.arm(false, false));
    let driver_events = network.now().after(lag);
    network.advance(driver_events);
    assert_eq!(one.released_bytes(), 4);
}

/// Memory is read once more before it is released, whether its data have arrived or were discarded,
/// and even after its end was dropped.
#[test]
fn memory_that_is_used_again_before_it_is_released_is_seen_to_leave() {
    let lag = Span::from_us(10);
    for case in 0..8 {
        let [has_arrived, is_dropped, is_early] = [1, 2, 4].map(|bit| case & bit != 0);
        let options = NetworkOptions { release_lag: lag, ..NetworkOptions::default() };
        let (memory, whole) = memory();
        let (mut one, mut other, network) = pair(options, Arc::clone(&memory), Arc::clone(&memory));
        let part = whole.slice(0, 4).unwrap();
        memory.store(part, b"good").unwrap();
        assert_eq!(one.send(b"", &[SendSlice::Memory(part)], false), Ok(4));
        if has_arrived {
            assert_eq!(other.receive(), RecvResult::Bytes(4));
        }
        one.abort();
        assert_eq!(one.released_bytes(), 0);
        let mut one = Some(one).filter(|_| !is_dropped);
        if !is_early {
            network.advance(network.now().after(lag));
        }
        memory.store(part, b"gold").unwrap();
        network.advance(network.now().after(lag));
        assert_eq!(one.as_mut().map_or(4, |one| one.released_bytes()), 4);
        assert_eq!(network.strays().len(), usize::from(is_early), "{:?}", network.strays());
    }
}

#[test]
fn a_cut_breaks_both_directions_after_exactly_so_many_bytes() {
    let there = LinkOptions { faults: Faults::one(3, Fault::Cut), ..LinkOptions::default() };
    let options = NetworkOptions { there, ..NetworkOptions::default() };
    let (memory, _) = memory();
    let (mut one, mut other, network) = pair(options, Arc::clone(&memory), memory);
    other.send(b"never", &header(5), false).unwrap();
    one.send(b"abcdef", &header(6), false).unwrap();
    assert_eq!(other.receive(), RecvResult::Bytes(3));
    assert!(matches!(other.receive(), RecvResult::Failed(_)));
    assert_eq!(other.buffered(), b"abc", "what had come stays");
    assert!(matches!(one.receive(), RecvResult::Failed(_)));
    assert!(one.send(b"g", &header(1), false).is_err());
    assert_eq!(one.released_bytes(), 6, "what was thrown away is read no more");
    assert_eq!(network.arrived(Direction::Upstream), 6);
}

#[test]
fn harm_from_outside_comes_with_the_next_byte() {
    let (memory, _) = memory();
    let (mut one, mut other, network) =
        pair(NetworkOptions::default(), Arc::clone(&memory), memory);
    network.harm(Direction::Upstream, Fault::Flip(0x20));
    one.send(b"abc", &header(3), false).unwrap();
    assert_eq!(other.receive(), RecvResult::Bytes(3));
    assert_eq!(other.buffered(), b"Abc");
    let frozen = Span::from_secs(1);
    network.harm(Direction::Upstream, Fault::Freeze(frozen));
    one.send(b"d", &header(1), false).unwrap();
    let start: Instant = network.now();
    assert_eq!(other.receive(), RecvResult::WouldBlock);
    assert_eq!(network.wake_at(), start.after(frozen));
    network.advance(start.after(frozen));
    assert_eq!(other.receive(), RecvResult::Bytes(1));
    network.cut();
    assert!(matches!(one.receive(), RecvResult::Failed(_)));
}

#[test]
fn an_end_that_goes_with_memory_under_way_is_never_read_again() {
    let (memory, whole) = memory();
    let part = whole.slice(0, 8).unwrap();
    for with_memory in [false, true] {
        let (mut one, mut other, _network) =
            pair(NetworkOptions::default(), Arc::clone(&memory), Arc::clone(&memory));
        let stretch = if with_memory { SendSlice::Memory(part) } else { header(8)[0] };
        assert_eq!(one.send(b"12345678", &[stretch], false), Ok(8));
        drop(one);
        match other.receive() {
            RecvResult::Bytes(8) if !with_memory => {}
            RecvResult::Failed(_) if with_memory => {}
            received => panic!("{received:?}"),
        }
    }
}
