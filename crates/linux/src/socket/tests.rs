use std::net::TcpListener;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tenmil_base::{Memory, RecvResult, Segment, SendSlice, Span, Stream, WakeSource};
use tenmil_dma::{Backing, KernelBufferSource, Mapping, RegionTable};
use tenmil_sim::network::conformance::{self, Pair, Wants};

use super::{SocketEngine, SocketFactory, SocketOptions};
use crate::poll_set::{Interest, PollSet};

fn memory() -> (RegionTable, Segment) {
    let regions = RegionTable::new(1);
    let whole = regions.add(Mapping::new(1 << 20, Backing::Private).unwrap()).unwrap();
    (regions, whole)
}

fn tcp() -> [OwnedFd; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [one.into(), listener.accept().unwrap().0.into()]
}

fn unix() -> [OwnedFd; 2] {
    let (one, other) = UnixStream::pair().unwrap();
    [one.into(), other.into()]
}

fn pair_of(options: SocketOptions, sockets: [OwnedFd; 2]) -> Pair {
    let (regions, whole) = memory();
    let made = SocketFactory::new(regions.clone(), options);
    let [one, other] = sockets.map(|socket| made.stream(socket).unwrap());
    let memory: Arc<dyn Memory> = Arc::new(regions);
    Pair { one, other, memory, whole, rest: Box::new(rest) }
}

/// Sleeps until an event of either end. An end that awaits nothing does not sleep long.
fn rest(ends: [(&mut dyn Stream, Wants); 2]) {
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

fn descriptor(stream: &dyn Stream) -> BorrowedFd<'_> {
    match stream.wake_source() {
        WakeSource::Descriptor(descriptor) => descriptor,
        _ => panic!("a socket has a descriptor"),
    }
}

#[test]
fn epoll_over_tcp_is_a_stream_like_any_other() {
    conformance::run(1, || pair_of(SocketOptions::default(), tcp()));
}

#[test]
fn epoll_over_unix_sockets_is_a_stream_like_any_other() {
    conformance::run(2, || pair_of(SocketOptions::default(), unix()));
}

#[test]
fn epoll_with_little_room_is_a_stream_like_any_other() {
    let options = SocketOptions {
        send_buffer_bytes: Some(4096),
        recv_buffer_bytes: 2048,
        ..SocketOptions::default()
    };
    conformance::run(3, || pair_of(options.clone(), unix()));
}

fn ring() -> SocketOptions {
    SocketOptions { engine: SocketEngine::IoUring, ..SocketOptions::default() }
}

/// Whether this kernel supports the ring; prints a note if not.
fn has_ring() -> bool {
    let sockets = SocketFactory::new(RegionTable::new(1), ring());
    if let Some(why) = sockets.io_uring_error() {
        eprintln!("skipped: io_uring: {why}");
    }
    sockets.engine() == "io_uring"
}

#[test]
fn a_ring_over_tcp_is_a_stream_like_any_other() {
    if has_ring() {
        conformance::run(4, || pair_of(ring(), tcp()));
    }
}

#[test]
fn a_ring_over_unix_sockets_is_a_stream_like_any_other() {
    if has_ring() {
        conformance::run(5, || pair_of(ring(), unix()));
    }
}

#[test]
fn a_ring_with_little_room_is_a_stream_like_any_other() {
    let options = SocketOptions {
        send_buffer_bytes: Some(4096),
        recv_buffer_bytes: 1024,
        recv_buffers_max: 4,
        ..ring()
    };
    if has_ring() {
        conformance::run(6, || pair_of(options.clone(), unix()));
    }
}

/// Every send with memory is zero-copy, until the kernel reports a copy.
fn by_reference(engine: SocketEngine) -> SocketOptions {
    SocketOptions { engine, zero_copy_from_bytes: Some(1), ..SocketOptions::default() }
}

#[test]
fn streams_that_do_not_copy_are_streams_like_any_other() {
    conformance::run(7, || pair_of(by_reference(SocketEngine::Epoll), tcp()));
    conformance::run(8, || pair_of(by_reference(SocketEngine::IoUring), tcp()));
    conformance::run(9, || pair_of(by_reference(SocketEngine::IoUring), unix()));
}

#[test]
fn sends_by_reference_end_once_the_kernel_reports_that_it_copies() {
    let engines = [SocketEngine::Epoll, SocketEngine::IoUring];
    for engine in engines.into_iter().filter(|it| *it == SocketEngine::Epoll || has_ring()) {
        let (regions, whole) = memory();
        let part = whole.slice(0, 10_000).unwrap();
        let sockets = SocketFactory::new(regions, by_reference(engine));
        sockets.set_zero_copy_from(Some(20_000));
        let [mut one, mut other] = tcp().map(|socket| sockets.stream(socket).unwrap());
        let mut send = |sent: u64| {
            assert_eq!(
                one.send(b"head", &[header(4)[0], SendSlice::Memory(part)], false),
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
            let counts = sockets.counts();
            (counts.sends_zero_copy, counts.zero_copy_copied)
        };
        assert_eq!(send(10_004), (0, 0), "{engine:?}: too little");
        sockets.set_zero_copy_from(Some(10_000));
        assert_eq!(send(20_008), (1, 1), "{engine:?}: loopback copies");
        assert_eq!(send(30_012), (1, 1), "{engine:?}: so it is left");
    }
}

#[test]
fn a_stream_without_techniques_is_one_like_any_other() {
    let curbed = SocketOptions { batch_send: false, msg_more: false, ..SocketOptions::default() };
    conformance::run(10, || pair_of(curbed.clone(), tcp()));
    let talkative = SocketOptions { batch_send: false, ..SocketOptions::default() };
    conformance::run(11, || pair_of(talkative.clone(), unix()));
}

#[test]
fn a_stream_that_does_not_gather_sends_each_piece_by_a_call_of_its_own() {
    for (gathers, calls) in [(true, 1), (false, 3)] {
        let (regions, whole) = memory();
        let options = SocketOptions { batch_send: gathers, ..SocketOptions::default() };
        let sockets = SocketFactory::new(regions, options);
        let [mut one, mut other] = tcp().map(|socket| sockets.stream(socket).unwrap());
        let piece = |at: u32| SendSlice::Memory(whole.slice(at * 100, 100).unwrap());
        let all = [header(4)[0], piece(0), piece(1), header(4)[0], piece(2)];
        assert_eq!(one.send(b"head", &all, false), Ok(308));
        assert_eq!(sockets.counts().sends, calls, "gathers: {gathers}");
        while other.buffered().len() < 308 {
            other.receive();
        }
        assert_eq!(
            (&other.buffered()[..4], &other.buffered()[204..208]),
            (&b"head"[..], &b"head"[..])
        );
        // Another factory has separate counters.
        assert_eq!(sockets.with_own_counters().counts().sends, 0);
    }
}

/// The memory of a dropped stream may be reused at once.
#[test]
fn memory_of_a_stream_that_has_gone_arrives_as_it_was_or_not_at_all() {
    use std::io::Read;
    let engines = [SocketEngine::Epoll, SocketEngine::IoUring];
    for engine in engines.into_iter().filter(|it| *it == SocketEngine::Epoll || has_ring()) {
        let regions = RegionTable::new(1);
        let whole = regions.add(Mapping::new(16 << 20, Backing::Private).unwrap()).unwrap();
        regions.fill(whole, 1).unwrap();
        let sockets = SocketFactory::new(regions.clone(), by_reference(engine));
        let [one, other] = tcp();
        let mut one = sockets.stream(one).unwrap();
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

fn header(len_bytes: u32) -> [SendSlice; 1] {
    [SendSlice::Headers { at: 0, len_bytes }]
}

#[test]
fn a_sleeper_is_woken_by_bytes_and_by_ends_and_by_nothing_else() {
    let mut pair = pair_of(SocketOptions::default(), tcp());
    let watch = PollSet::new().unwrap();
    watch.add(descriptor(&*pair.other), 0, Interest { readable: true, writable: false }).unwrap();
    let is_woken = |time_limit| {
        let mut found = Vec::new();
        watch.wait(Some(time_limit), &mut found).unwrap();
        !found.is_empty()
    };
    let (short, long) = (Span::from_us(100), Span::from_secs(5));
    assert!(!pair.other.arm(true, false));
    assert!(!is_woken(short));
    pair.one.send(b"x", &header(1), false).unwrap();
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
    assert!(!is_woken(short), "an end that is known wakes nobody");
    drop(pair.one);
    pair.other.arm(false, false);
    assert!(!is_woken(short));
}

#[test]
fn connections_share_the_inboxes_of_their_thread() {
    let options =
        SocketOptions { recv_buffers_max: 1, recv_buffer_bytes: 4096, ..SocketOptions::default() };
    let (regions, _) = memory();
    let sockets = SocketFactory::new(regions, options);
    let [mut one, mut other] = unix().map(|socket| sockets.stream(socket).unwrap());
    one.send(&[7; 2000], &header(2000), false).unwrap();
    other.send(&[8; 100], &header(100), false).unwrap();
    assert_eq!(other.receive(), RecvResult::Bytes(2000));
    assert_eq!(one.receive(), RecvResult::WouldBlock, "the inbox is lent");
    assert_eq!(sockets.counts().without_buffer, 1);
    assert!(!one.arm(true, false), "and nothing is gained by staying awake");
    assert!(!one.is_fully_armed(), "but it has to be armed again");
    other.consume(2000);
    assert_eq!(one.receive(), RecvResult::Bytes(100));
    assert_eq!(other.receive(), RecvResult::WouldBlock);
    assert_eq!(one.buffered(), [8; 100]);
    one.consume(100);
    assert!(!one.arm(true, false) && one.is_fully_armed(), "the inbox has come back");
    let counts = sockets.counts();
    assert_eq!((counts.receives, counts.receives_empty, counts.sends), (2, 0, 2));
}

/// Memory, and the kernel-owned buffers of four requests of 64 KiB, backed by a file.
fn lending() -> (RegionTable, Segment, Segment) {
    let regions = RegionTable::new(2);
    let whole = regions.add(Mapping::new(1 << 20, Backing::Private).unwrap()).unwrap();
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
fn what_was_lent_is_sent_between_what_was_not_and_received_where_it_belongs() {
    let (regions, whole, leased) = lending();
    for options in
        [SocketOptions::default(), SocketOptions { batch_send: false, ..SocketOptions::default() }]
    {
        let sockets = SocketFactory::new(regions.clone(), options);
        let [mut one, mut other] = tcp().map(|socket| sockets.stream(socket).unwrap());
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
fn what_is_lent_no_more_ends_a_stream_behind_what_went_before_it() {
    let (regions, whole, leased) = lending();
    let sockets = SocketFactory::new(regions.clone(), SocketOptions::default());
    let [mut one, mut other] = tcp().map(|socket| sockets.stream(socket).unwrap());
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
fn a_stream_takes_no_more_than_it_is_asked_for_and_the_rest_wakes_it() {
    let (regions, _) = memory();
    let sockets = SocketFactory::new(regions, SocketOptions::default());
    let [mut one, mut other] = tcp().map(|socket| sockets.stream(socket).unwrap());
    send_from(&mut *one, b"head and body");
    rest([(&mut *one, Wants::default()), (&mut *other, Wants { bytes: true, room: false })]);
    assert_eq!(other.receive_up_to(4), RecvResult::Bytes(4));
    assert_eq!(other.buffered(), b"head");
    rest([(&mut *one, Wants::default()), (&mut *other, Wants { bytes: true, room: false })]);
    assert_eq!(other.receive_up_to(4), RecvResult::Bytes(4), "behind what was not consumed");
    assert_eq!(other.buffered(), b"head and");
    assert_eq!(other.receive(), RecvResult::Bytes(5));
    assert_eq!(other.buffered(), b"head and body");
    assert_eq!(other.receive_up_to(1), RecvResult::WouldBlock);
}
