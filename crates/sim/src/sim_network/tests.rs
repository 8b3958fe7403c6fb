use std::sync::Arc;

use tenmil_base::{Instant, Memory, RecvResult, Segment, SendSlice, Span, Stream};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

use super::stream_conformance_tests::{self, StreamPair};
use super::{
    LinkFault, LinkFaults, LinkOptions, LinkTransferDirection, NetworkOptions, SimNetwork,
    connected_pair,
};

fn test_memory() -> (Arc<dyn Memory>, Segment) {
    let regions = RegionTable::new(1);
    let whole =
        regions.add_mapping(MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap()).unwrap();
    (Arc::new(regions), whole)
}

fn test_pair(options: NetworkOptions) -> StreamPair {
    let (memory, whole) = test_memory();
    let (one, other, network) = connected_pair(options, Arc::clone(&memory), Arc::clone(&memory));
    let rest = move |_: [(&mut dyn Stream, stream_conformance_tests::WaitCondition); 2]| {
        advance_time(&network)
    };
    StreamPair { one: Box::new(one), other: Box::new(other), memory, whole, rest: Box::new(rest) }
}

/// Advances the time to the next arrival, or by a small step.
fn advance_time(network: &SimNetwork) {
    let (now, wake) = (network.now(), network.wake_at());
    let later = now.after(Span::from_us(100));
    network.advance(if wake > now { wake.min(later) } else { later });
}

#[test]
fn simulated_network_passes_the_stream_tests() {
    stream_conformance_tests::run_stream_tests(1, || test_pair(NetworkOptions::default()));
}

#[test]
fn network_with_splits_delays_and_small_buffers_passes_the_stream_tests() {
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
        stream_conformance_tests::run_stream_tests(seed, || test_pair(options.clone()));
    }
}

fn pdu_header(len_bytes: u32) -> [SendSlice; 1] {
    [SendSlice::Headers { at: 0, len_bytes }]
}

#[test]
fn reused_unreleased_memory_arrives_changed() {
    let (memory, whole) = test_memory();
    let (mut one, mut other, network) =
        connected_pair(NetworkOptions::default(), Arc::clone(&memory), Arc::clone(&memory));
    let part = whole.slice(0, 4).unwrap();
    memory.store(part, b"good").unwrap();
    assert_eq!(one.send(b"ab", &[SendSlice::Memory(part), pdu_header(2)[0]], false), Ok(6));
    assert_eq!(one.released_bytes(), 0);
    memory.store(part, b"evil").unwrap();
    assert_eq!(other.receive(), RecvResult::Bytes(6));
    assert_eq!(other.buffered(), b"evilab", "the headers were copied");
    network.advance(network.now());
    assert_eq!(one.released_bytes(), 6);
}

#[test]
fn release_is_reported_late_and_wakes_an_armed_stream() {
    let lag = Span::from_us(10);
    let options = NetworkOptions { release_lag: lag, ..NetworkOptions::default() };
    let (memory, whole) = test_memory();
    let (mut one, mut other, network) = connected_pair(options, Arc::clone(&memory), memory);
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
fn reused_unreleased_memory_is_detected() {
    let lag = Span::from_us(10);
    for case in 0..8 {
        let [has_arrived, is_dropped, is_early] = [1, 2, 4].map(|bit| case & bit != 0);
        let options = NetworkOptions { release_lag: lag, ..NetworkOptions::default() };
        let (memory, whole) = test_memory();
        let (mut one, mut other, network) =
            connected_pair(options, Arc::clone(&memory), Arc::clone(&memory));
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
        assert_eq!(
            network.changed_unreleased_memory().len(),
            usize::from(is_early),
            "{:?}",
            network.changed_unreleased_memory()
        );
    }
}

#[test]
fn cut_breaks_both_directions_after_the_exact_byte_count() {
    let there =
        LinkOptions { faults: LinkFaults::single(3, LinkFault::Cut), ..LinkOptions::default() };
    let options = NetworkOptions { there, ..NetworkOptions::default() };
    let (memory, _) = test_memory();
    let (mut one, mut other, network) = connected_pair(options, Arc::clone(&memory), memory);
    other.send(b"never", &pdu_header(5), false).unwrap();
    one.send(b"abcdef", &pdu_header(6), false).unwrap();
    assert_eq!(other.receive(), RecvResult::Bytes(3));
    assert!(matches!(other.receive(), RecvResult::Failed(_)));
    assert_eq!(other.buffered(), b"abc", "what had come stays");
    assert!(matches!(one.receive(), RecvResult::Failed(_)));
    assert!(one.send(b"g", &pdu_header(1), false).is_err());
    assert_eq!(one.released_bytes(), 6, "what was thrown away is read no more");
    assert_eq!(network.arrived_byte_count(LinkTransferDirection::Upstream), 6);
}

#[test]
fn injected_fault_takes_effect_at_the_next_byte() {
    let (memory, _) = test_memory();
    let (mut one, mut other, network) =
        connected_pair(NetworkOptions::default(), Arc::clone(&memory), memory);
    network.inject_fault(LinkTransferDirection::Upstream, LinkFault::Flip(0x20));
    one.send(b"abc", &pdu_header(3), false).unwrap();
    assert_eq!(other.receive(), RecvResult::Bytes(3));
    assert_eq!(other.buffered(), b"Abc");
    let frozen = Span::from_secs(1);
    network.inject_fault(LinkTransferDirection::Upstream, LinkFault::Freeze(frozen));
    one.send(b"d", &pdu_header(1), false).unwrap();
    let start: Instant = network.now();
    assert_eq!(other.receive(), RecvResult::WouldBlock);
    assert_eq!(network.wake_at(), start.after(frozen));
    network.advance(start.after(frozen));
    assert_eq!(other.receive(), RecvResult::Bytes(1));
    network.cut_links();
    assert!(matches!(one.receive(), RecvResult::Failed(_)));
}

#[test]
fn memory_of_a_dropped_stream_is_not_read_again() {
    let (memory, whole) = test_memory();
    let part = whole.slice(0, 8).unwrap();
    for with_memory in [false, true] {
        let (mut one, mut other, _network) =
            connected_pair(NetworkOptions::default(), Arc::clone(&memory), Arc::clone(&memory));
        let stretch = if with_memory { SendSlice::Memory(part) } else { pdu_header(8)[0] };
        assert_eq!(one.send(b"12345678", &[stretch], false), Ok(8));
        drop(one);
        match other.receive() {
            RecvResult::Bytes(8) if !with_memory => {}
            RecvResult::Failed(_) if with_memory => {}
            received => panic!("{received:?}"),
        }
    }
}
