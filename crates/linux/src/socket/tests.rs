use std::net::TcpListener;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tenmil_base::{Memory, RecvResult, Segment, SendSlice, Span, Stream, WakeSource};
use tenmil_dma::{KernelBufferSource, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_sim::sim_network::stream_conformance_tests::{self, StreamPair, WaitCondition};

use super::{SocketEngine, SocketOptions, SocketStreamFactory};
use crate::poll_set::{Interest, PollSet};

fn test_memory() -> (RegionTable, Segment) {
    let regions = RegionTable::new(1);
    let whole =
        regions.add_mapping(MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap()).unwrap();
    (regions, whole)
}

fn tcp_pair() -> [OwnedFd; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [one.into(), listener.accept().unwrap().0.into()]
}

fn unix_pair() -> [OwnedFd; 2] {
    let (one, other) = UnixStream::pair().unwrap();
    [one.into(), other.into()]
}

fn stream_pair(options: SocketOptions, sockets: [OwnedFd; 2]) -> StreamPair {
    let (regions, whole) = test_memory();
    let made = SocketStreamFactory::new(regions.clone(), options);
    let [one, other] = sockets.map(|socket| made.new_stream(socket).unwrap());
    let memory: Arc<dyn Memory> = Arc::new(regions);
    StreamPair { one, other, memory, whole, rest: Box::new(wait_for_either_end) }
}

/// Sleeps until an event of either end. An end that awaits nothing does not sleep long.
fn wait_for_either_end(ends: [(&mut dyn Stream, WaitCondition); 2]) {
    let watch = PollSet::new().unwrap();
    let mut stays_awake = false;
    let mut wants_something = false;
    let mut ends = ends;
    for (end, wants) in &mut ends {
        wants_something |= wants.bytes || wants.room;
        stays_awake |= end.arm(wants.bytes, wants.room);
        // A dropped one has no descriptor.
        if let WakeSource::Descriptor(descriptor) = end.wake_source() {
            watch.add(descriptor, 0, Interest { readable: true, writable: false }).unwrap();
        }
    }
    if !stays_awake {
        let time_limit = if wants_something { Span::from_secs(5) } else { Span::from_us(200) };
        let mut found = Vec::new();
        watch.wait(Some(time_limit), &mut found).unwrap();
        assert!(!wants_something || !found.is_empty(), "nothing wakes it");
    }
    for (end, _) in ends {
        end.disarm();
    }
}

fn wake_descriptor(stream: &dyn Stream) -> BorrowedFd<'_> {
    match stream.wake_source() {
        WakeSource::Descriptor(descriptor) => descriptor,
        _ => panic!("a socket has a descriptor"),
    }
}

#[test]
fn epoll_over_tcp_passes_the_stream_tests() {
    stream_conformance_tests::run_stream_tests(1, || {
        stream_pair(SocketOptions::default(), tcp_pair())
    });
}

#[test]
fn epoll_over_unix_sockets_passes_the_stream_tests() {
    stream_conformance_tests::run_stream_tests(2, || {
        stream_pair(SocketOptions::default(), unix_pair())
    });
}

#[test]
fn epoll_with_small_socket_buffers_passes_the_stream_tests() {
    let options = SocketOptions {
        send_buffer_bytes: Some(4096),
        recv_buffer_bytes: 2048,
        ..SocketOptions::default()
    };
    stream_conformance_tests::run_stream_tests(3, || stream_pair(options.clone(), unix_pair()));
}

fn io_uring_options() -> SocketOptions {
    SocketOptions { engine: SocketEngine::IoUring, ..SocketOptions::default() }
}

/// Whether this kernel supports the ring; prints a note if not.
fn has_ring() -> bool {
    let sockets = SocketStreamFactory::new(RegionTable::new(1), io_uring_options());
    if let Some(why) = sockets.io_uring_error() {
        eprintln!("skipped: io_uring: {why}");
    }
    sockets.engine() == "io_uring"
}

#[test]
fn ring_over_tcp_passes_the_stream_tests() {
    if has_ring() {
        stream_conformance_tests::run_stream_tests(4, || {
            stream_pair(io_uring_options(), tcp_pair())
        });
    }
}

#[test]
fn ring_over_unix_sockets_passes_the_stream_tests() {
    if has_ring() {
        stream_conformance_tests::run_stream_tests(5, || {
            stream_pair(io_uring_options(), unix_pair())
        });
    }
}

#[test]
fn ring_with_small_socket_buffers_passes_the_stream_tests() {
    let options = SocketOptions {
        send_buffer_bytes: Some(4096),
        recv_buffer_bytes: 1024,
        recv_buffers_max: 4,
        ..io_uring_options()
    };
    if has_ring() {
        stream_conformance_tests::run_stream_tests(6, || stream_pair(options.clone(), unix_pair()));
    }
}

/// Every send with memory is zero-copy, until the kernel reports a copy.
fn zero_copy_options(engine: SocketEngine) -> SocketOptions {
    SocketOptions { engine, zero_copy_from_bytes: Some(1), ..SocketOptions::default() }
}

#[test]
fn zero_copy_streams_pass_the_stream_tests() {
    stream_conformance_tests::run_stream_tests(7, || {
        stream_pair(zero_copy_options(SocketEngine::Epoll), tcp_pair())
    });
    stream_conformance_tests::run_stream_tests(8, || {
        stream_pair(zero_copy_options(SocketEngine::IoUring), tcp_pair())
    });
    stream_conformance_tests::run_stream_tests(9, || {
        stream_pair(zero_copy_options(SocketEngine::IoUring), unix_pair())
    });
}

#[test]
fn zero_copy_is_disabled_once_the_kernel_reports_copies() {
    let engines = [SocketEngine::Epoll, SocketEngine::IoUring];
    for engine in engines.into_iter().filter(|it| *it == SocketEngine::Epoll || has_ring()) {
        let (regions, whole) = test_memory();
        let part = whole.slice(0, 10_000).unwrap();
        let sockets = SocketStreamFactory::new(regions, zero_copy_options(engine));
        sockets.set_zero_copy_from(Some(20_000));
        let [mut one, mut other] = tcp_pair().map(|socket| sockets.new_stream(socket).unwrap());
        let mut send = |sent: u64| {
            assert_eq!(
                one.send(b"head", &[pdu_header(4)[0], SendSlice::Memory(part)], false),
                Ok(10_004)
            );
            let mut came = 0;
            while came < 10_004 || one.released_bytes() < sent {
                if let RecvResult::Bytes(_) = other.receive() {
                    came += other.buffered().len();
                    other.consume(other.buffered().len());
                }
                let _ = one.receive();
            }
            let counts = sockets.socket_stats();
            (counts.sends_zero_copy, counts.zero_copy_copied)
        };
        assert_eq!(send(10_004), (0, 0), "{engine:?}: too little");
        sockets.set_zero_copy_from(Some(10_000));
        assert_eq!(send(20_008), (1, 1), "{engine:?}: loopback copies");
        assert_eq!(send(30_012), (1, 1), "{engine:?}: so it is left");
    }
}

#[test]
fn stream_without_gather_passes_the_conformance_tests() {
    let curbed = SocketOptions { batch_send: false, msg_more: false, ..SocketOptions::default() };
    stream_conformance_tests::run_stream_tests(10, || stream_pair(curbed.clone(), tcp_pair()));
    let talkative = SocketOptions { batch_send: false, ..SocketOptions::default() };
    stream_conformance_tests::run_stream_tests(11, || stream_pair(talkative.clone(), unix_pair()));
}

#[test]
fn stream_without_gathering_sends_each_segment_separately() {
    for (gathers, calls) in [(true, 1), (false, 3)] {
        let (regions, whole) = test_memory();
        let options = SocketOptions { batch_send: gathers, ..SocketOptions::default() };
        let sockets = SocketStreamFactory::new(regions, options);
        let [mut one, mut other] = tcp_pair().map(|socket| sockets.new_stream(socket).unwrap());
        let piece = |at: u32| SendSlice::Memory(whole.slice(at * 100, 100).unwrap());
        let all = [pdu_header(4)[0], piece(0), piece(1), pdu_header(4)[0], piece(2)];
        assert_eq!(one.send(b"head", &all, false), Ok(308));
        assert_eq!(sockets.socket_stats().sends, calls, "gathers: {gathers}");
        while other.buffered().len() < 308 {
            other.receive();
        }
        assert_eq!(
            (&other.buffered()[..4], &other.buffered()[204..208]),
            (&b"head"[..], &b"head"[..])
        );
        // Another factory has separate counters.
        assert_eq!(sockets.with_own_counters().socket_stats().sends, 0);
    }
}

/// The memory of a dropped stream may be reused at once.
#[test]
fn memory_of_a_dropped_stream_arrives_unchanged_or_not_at_all() {
    use std::io::Read;
    let engines = [SocketEngine::Epoll, SocketEngine::IoUring];
    for engine in engines.into_iter().filter(|it| *it == SocketEngine::Epoll || has_ring()) {
        let regions = RegionTable::new(1);
        let whole = regions
            .add_mapping(MemoryMapping::new(16 << 20, MemoryBacking::Private).unwrap())
            .unwrap();
        regions.fill(whole, 1).unwrap();
        let sockets = SocketStreamFactory::new(regions.clone(), zero_copy_options(engine));
        let [one, other] = tcp_pair();
        let mut one = sockets.new_stream(one).unwrap();
        assert!(one.send(&[], &[SendSlice::Memory(whole)], false).unwrap() > 0);
        (0..3).for_each(|_| assert_eq!(one.receive(), RecvResult::WouldBlock));
        drop(one);
        regions.fill(whole, 2).unwrap();
        let mut other = std::net::TcpStream::from(other);
        other.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
        let mut came = vec![0; 1 << 20];
        while let Ok(count @ 1..) = other.read(&mut came) {
            assert!(
                came[..count].iter().all(|byte| *byte == 1),
                "{engine:?}: used again too early"
            );
        }
    }
}

fn pdu_header(len_bytes: u32) -> [SendSlice; 1] {
    [SendSlice::Headers { at: 0, len_bytes }]
}

#[test]
fn sleeper_is_woken_by_bytes_and_stream_ends_only() {
    let mut pair = stream_pair(SocketOptions::default(), tcp_pair());
    let watch = PollSet::new().unwrap();
    watch
        .add(wake_descriptor(&*pair.other), 0, Interest { readable: true, writable: false })
        .unwrap();
    let is_woken = |time_limit| {
        let mut found = Vec::new();
        watch.wait(Some(time_limit), &mut found).unwrap();
        !found.is_empty()
    };
    let (short, long) = (Span::from_us(100), Span::from_secs(5));
    assert!(!pair.other.arm(true, false));
    assert!(!is_woken(short));
    pair.one.send(b"x", &pdu_header(1), false).unwrap();
    assert!(is_woken(long));
    assert!(!pair.other.arm(false, false));
    assert!(!is_woken(short), "it wants nothing now");
    pair.other.arm(false, true);
    assert!(is_woken(long), "there is room");
    pair.other.arm(true, false);
    assert_eq!(pair.other.receive(), RecvResult::Bytes(1));
    assert!(!is_woken(short));
    pair.one.shutdown_write();
    assert!(is_woken(long));
    assert_eq!(pair.other.receive(), RecvResult::Eof);
    pair.other.arm(true, false);
    assert!(!is_woken(short), "a received end of stream causes no wake-up");
    drop(pair.one);
    pair.other.arm(false, false);
    assert!(!is_woken(short));
}

#[test]
fn connections_of_a_thread_share_its_receive_buffers() {
    let options =
        SocketOptions { recv_buffers_max: 1, recv_buffer_bytes: 4096, ..SocketOptions::default() };
    let (regions, _) = test_memory();
    let sockets = SocketStreamFactory::new(regions, options);
    let [mut one, mut other] = unix_pair().map(|socket| sockets.new_stream(socket).unwrap());
    one.send(&[7; 2000], &pdu_header(2000), false).unwrap();
    other.send(&[8; 100], &pdu_header(100), false).unwrap();
    assert_eq!(other.receive(), RecvResult::Bytes(2000));
    assert_eq!(one.receive(), RecvResult::WouldBlock, "the inbox is lent");
    assert_eq!(sockets.socket_stats().without_buffer, 1);
    assert!(!one.arm(true, false), "and nothing is gained by staying awake");
    assert!(!one.is_fully_armed(), "but it has to be armed again");
    other.consume(2000);
    assert_eq!(one.receive(), RecvResult::Bytes(100));
    assert_eq!(other.receive(), RecvResult::WouldBlock);
    assert_eq!(one.buffered(), [8; 100]);
    one.consume(100);
    assert!(!one.arm(true, false) && one.is_fully_armed(), "the inbox has come back");
    let counts = sockets.socket_stats();
    assert_eq!((counts.receives, counts.receives_empty, counts.sends), (2, 0, 2));
}

/// Memory, and the kernel-owned buffers of four requests of 64 KiB, backed by a file.
fn kernel_buffer_regions() -> (RegionTable, Segment, Segment) {
    let regions = RegionTable::new(2);
    let whole =
        regions.add_mapping(MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap()).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(4 << 16).unwrap();
    let data_at = |_, request, byte| u64::from(request) << 16 | u64::from(byte);
    let lender = KernelBufferSource { descriptor: file.into(), queue: 0, data_at };
    let leased = regions.register_kernel_buffers(lender, (4, 1 << 16)).unwrap();
    (regions, whole, leased)
}

fn pattern(seed: u8, len: u32) -> Vec<u8> {
    (0..len).map(|at| seed.wrapping_add((at % 251) as u8)).collect()
}

fn send_all(stream: &mut dyn Stream, headers: &[u8], stretches: &[SendSlice]) {
    let total: usize = stretches.iter().map(SendSlice::len_bytes).sum();
    assert_eq!(stream.send(headers, stretches, false), Ok(total));
    assert_eq!(stream.released_bytes(), total as u64, "nothing is held");
}

#[test]
fn kernel_buffers_are_sent_in_order_and_received_into_place() {
    let (regions, whole, leased) = kernel_buffer_regions();
    for options in
        [SocketOptions::default(), SocketOptions { batch_send: false, ..SocketOptions::default() }]
    {
        let sockets = SocketStreamFactory::new(regions.clone(), options);
        let [mut one, mut other] = tcp_pair().map(|socket| sockets.new_stream(socket).unwrap());
        let part = |segment: Segment, at, len| segment.slice(at, len).unwrap();
        let parts = [
            (part(leased, 512, 3000), 1_u8),
            (part(whole, 0, 700), 2),
            (part(leased, 1 << 16, 1 << 16), 3),
            (part(leased, (2 << 16) + 100, 10), 4),
        ];
        for (segment, seed) in parts {
            regions.store(segment, &pattern(seed, segment.len_bytes)).unwrap();
        }
        let header = |at| SendSlice::Headers { at, len_bytes: 3 };
        let memory = |at: usize| SendSlice::Memory(parts[at].0);
        let stretches =
            [header(0), memory(0), header(3), memory(1), memory(2), memory(3), header(6)];
        send_all(&mut *one, b"abcdefghi", &stretches);
        let mut expected = b"abc".to_vec();
        expected.extend(pattern(1, 3000));
        expected.extend(b"def");
        for (segment, seed) in &parts[1..] {
            expected.extend(pattern(*seed, segment.len_bytes));
        }
        expected.extend(b"ghi");
        // The first three bytes, the next into the kernel-owned buffer, the rest again as they
        // arrive.
        let into = part(leased, (3 << 16) + 7, 5000);
        assert_eq!(other.receive_up_to(3), RecvResult::Bytes(3));
        assert_eq!(other.buffered(), b"abc");
        other.consume(3);
        let mut placed = 0;
        while placed < into.len_bytes {
            let rest = into.slice(placed, into.len_bytes - placed).unwrap();
            match other.receive_into(&[rest.slice(0, 0).unwrap(), rest]) {
                RecvResult::Bytes(count) => placed += u32::try_from(count).unwrap(),
                RecvResult::WouldBlock => std::thread::yield_now(),
                over => panic!("{over:?}"),
            }
        }
        let mut found = vec![0; 5000];
        regions.load(into, &mut found).unwrap();
        assert!(found == expected[3..5003]);
        let mut rest = Vec::new();
        while rest.len() < expected.len() - 5003 {
            other.receive();
            rest.extend_from_slice(other.buffered());
            other.consume(other.buffered().len());
        }
        assert!(rest == expected[5003..]);
        drop(one);
        assert_eq!(other.receive_into(&[into]), RecvResult::Eof);
    }
}

#[test]
fn unregistered_kernel_buffer_ends_the_stream_after_earlier_data() {
    let (regions, whole, leased) = kernel_buffer_regions();
    let sockets = SocketStreamFactory::new(regions.clone(), SocketOptions::default());
    let [mut one, mut other] = tcp_pair().map(|socket| sockets.new_stream(socket).unwrap());
    let last = leased.slice(3 << 16, 4096).unwrap();
    rustix::fs::ftruncate(regions.kernel_buffer(last).unwrap().descriptor, 3 << 16).unwrap();
    let stretches = [SendSlice::Memory(whole.slice(0, 100).unwrap()), SendSlice::Memory(last)];
    assert_eq!(one.send(&[], &stretches, false), Ok(100));
    assert!(one.send(&[], &stretches[1..], false).is_err());
    let stray = Segment { offset: 1 << 30, len_bytes: 8, ..whole };
    let refused = one.send(&[], &[stretches[0], SendSlice::Memory(stray)], false);
    assert!(refused.is_err_and(|broken| broken.0.contains("lies in no region")));
    // With another kernel-owned slice behind it, an ordinary slice is sent by itself.
    send_from(&mut *other, b"12345678");
    let first = whole.slice(50, 4).unwrap();
    let received = (0..1000).find_map(|_| match one.receive_into(&[first, last]) {
        RecvResult::WouldBlock => None,
        other => Some(other),
    });
    assert_eq!(received, Some(RecvResult::Bytes(4)));
}

fn send_from(stream: &mut dyn Stream, bytes: &[u8]) {
    let len_bytes = u32::try_from(bytes.len()).unwrap();
    let whole = [SendSlice::Headers { at: 0, len_bytes }];
    assert_eq!(stream.send(bytes, &whole, false), Ok(bytes.len()));
}

#[test]
fn receive_up_to_limits_bytes_and_the_rest_wakes() {
    let (regions, _) = test_memory();
    let sockets = SocketStreamFactory::new(regions, SocketOptions::default());
    let [mut one, mut other] = tcp_pair().map(|socket| sockets.new_stream(socket).unwrap());
    send_from(&mut *one, b"head and body");
    wait_for_either_end([
        (&mut *one, WaitCondition::default()),
        (&mut *other, WaitCondition { bytes: true, room: false }),
    ]);
    assert_eq!(other.receive_up_to(4), RecvResult::Bytes(4));
    assert_eq!(other.buffered(), b"head");
    wait_for_either_end([
        (&mut *one, WaitCondition::default()),
        (&mut *other, WaitCondition { bytes: true, room: false }),
    ]);
    assert_eq!(other.receive_up_to(4), RecvResult::Bytes(4), "behind what was not consumed");
    assert_eq!(other.buffered(), b"head and");
    assert_eq!(other.receive(), RecvResult::Bytes(5));
    assert_eq!(other.buffered(), b"head and body");
    assert_eq!(other.receive_up_to(1), RecvResult::WouldBlock);
}
