use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tenmil_base::{RecvResult, SendSlice, Stream};
use tenmil_dma::RegionTable;

use super::super::socket_options::SocketOptions;
use super::super::socket_stream_factory::SharedSocketStats;
use super::super::zero_copy::ZeroCopyThreshold;
use super::{EntryKind, RingStream, SocketRing, from_user_data, to_user_data};

/// A ring, if this kernel supports it; prints a note if not.
fn test_ring() -> Option<SocketRing> {
    test_ring_with(SocketOptions { recv_buffers_max: 16, ..SocketOptions::default() })
}

fn test_ring_with(options: SocketOptions) -> Option<SocketRing> {
    match SocketRing::new(&options, Arc::<SharedSocketStats>::default()) {
        Ok(ring) => Some(ring),
        Err(errno) => {
            eprintln!("skipped: io_uring: {errno}");
            None
        }
    }
}

fn stream_pair(ring: &SocketRing) -> [RingStream; 2] {
    let (one, other) = UnixStream::pair().unwrap();
    [one, other].map(|socket| {
        socket.set_nonblocking(true).unwrap();
        let threshold = ZeroCopyThreshold::new(None);
        RingStream::new(ring.clone(), socket.into(), RegionTable::new(1), threshold).unwrap()
    })
}

fn send_all(stream: &mut RingStream, bytes: &[u8]) -> usize {
    let len_bytes = u32::try_from(bytes.len()).unwrap();
    stream.send(bytes, &[SendSlice::Headers { at: 0, len_bytes }], false).unwrap()
}

#[test]
fn user_data_encodes_key_and_kind() {
    for kind in [EntryKind::Receive, EntryKind::Send(0), EntryKind::Send(15), EntryKind::Cancel] {
        for key in [0, 1, u32::MAX] {
            assert_eq!(from_user_data(to_user_data(key, kind)), (key, kind));
        }
    }
}

#[test]
fn one_enter_per_iteration_for_any_number_of_streams() {
    let Some(ring) = test_ring() else { return };
    let mut pairs: Vec<[RingStream; 2]> = (0..4).map(|_| stream_pair(&ring)).collect();
    let mut turn = || {
        let before = ring.lock_state().counts.enters.get();
        let mut came = 0;
        for stream in pairs.iter_mut().flatten() {
            came += usize::from(matches!(stream.receive(), RecvResult::Bytes(_)));
            send_all(stream, b"x");
        }
        (ring.lock_state().counts.enters.get() - before, came)
    };
    // The first iterations register the sockets.
    for _ in 0..3 {
        turn();
    }
    for _ in 0..10 {
        assert_eq!(turn(), (1, 8));
    }
}

#[test]
fn dropped_streams_leave_no_state() {
    let Some(ring) = test_ring() else { return };
    for round in 0..20 {
        let [mut one, mut other] = stream_pair(&ring);
        // Data received and not polled, data polled and not consumed, and a receive and a send in
        // flight.
        send_all(&mut one, &[7; 3000]);
        while other.receive() == RecvResult::WouldBlock {}
        send_all(&mut one, &[8; 3000]);
        one.receive();
        one.receive();
        if round % 2 == 0 {
            let block = vec![0; 100_000];
            for _ in 0..100 {
                send_all(&mut other, &block);
                other.arm(false, false);
            }
        }
        drop(one);
        drop(other);
        let core = ring.lock_state();
        assert!(core.slots.iter().all(Option::is_none), "round {round}");
        assert_eq!(core.buffers.kernel_owned_count(), 16, "round {round}");
    }
}

#[test]
fn completion_during_arm_keeps_the_thread_awake() {
    let Some(ring) = test_ring() else { return };
    let [mut first, mut far] = stream_pair(&ring);
    let [mut second, _other] = stream_pair(&ring);
    while first.receive() != RecvResult::WouldBlock || ring.lock_state().unsubmitted > 0 {}
    assert!(!first.arm(true, false));
    send_all(&mut far, b"x");
    // It enters, to submit its send.
    assert!(second.arm(true, false), "the first one has something now");
    first.disarm();
    second.disarm();
    assert_eq!(first.receive(), RecvResult::Bytes(1));
}

#[test]
fn use_from_another_thread_is_an_error() {
    let Some(ring) = test_ring() else { return };
    let [mut one, other] = stream_pair(&ring);
    one.receive();
    one.receive();
    let received = std::thread::scope(|scope| {
        let theirs = scope.spawn(|| {
            let mut other = other;
            (0..3).map(|_| other.receive()).last()
        });
        theirs.join().unwrap()
    });
    let Some(RecvResult::Failed(broken)) = received else { panic!("{received:?}") };
    assert!(broken.0.ends_with("its ring is another thread's"), "{broken}");
    // The error was the other thread's and does not affect the ring.
    let [mut first, mut second] = stream_pair(&ring);
    send_all(&mut first, b"x");
    let came =
        (0..3).find_map(|_| Some(second.receive()).filter(|it| *it != RecvResult::WouldBlock));
    assert_eq!(came, Some(RecvResult::Bytes(1)));
    let ended = (0..3).find_map(|_| Some(one.receive()).filter(|it| *it != RecvResult::WouldBlock));
    assert_eq!(ended, Some(RecvResult::Eof), "what went in the other thread has gone");
}

#[test]
fn unused_streams_may_be_dropped_on_any_thread() {
    let Some(ring) = test_ring() else { return };
    let unused = stream_pair(&ring);
    std::thread::scope(|scope| scope.spawn(|| drop(unused)).join().unwrap());
    let [mut first, mut second] = stream_pair(&ring);
    send_all(&mut first, b"x");
    let came =
        (0..3).find_map(|_| Some(second.receive()).filter(|it| *it != RecvResult::WouldBlock));
    assert_eq!(came, Some(RecvResult::Bytes(1)));
}

/// Another socket floods its own, and nothing consumes the data.
#[test]
fn socket_with_unconsumed_data_leaves_buffers_to_others() {
    for inboxes_max in [4, 64] {
        let inbox_bytes = 1024;
        let Some(ring) = test_ring_with(SocketOptions {
            recv_buffers_max: inboxes_max,
            recv_buffer_bytes: inbox_bytes,
            ..SocketOptions::default()
        }) else {
            return;
        };
        let [mut flood, mut full] = stream_pair(&ring);
        // It was the only socket at first.
        for _ in 0..4 {
            full.receive();
        }
        let [mut one, mut other] = stream_pair(&ring);
        send_all(&mut flood, &[7; 100_000]);
        for round in 0..100 {
            full.receive();
            flood.receive();
            assert_eq!(send_all(&mut one, b"x"), 1);
            let came = (0..4).any(|_| other.receive() != RecvResult::WouldBlock);
            assert!(came, "{inboxes_max}, round {round}");
            assert_eq!(other.buffered(), b"x");
            other.consume(1);
        }
        let core = ring.lock_state();
        assert!(
            core.buffers.kernel_owned_count() >= inboxes_max - 3,
            "{:?} of {inboxes_max}",
            core.buffers
        );
    }
}

#[test]
fn single_socket_stops_before_holding_all_buffers() {
    let Some(ring) = test_ring_with(SocketOptions {
        recv_buffers_max: 64,
        recv_buffer_bytes: 1024,
        ..SocketOptions::default()
    }) else {
        return;
    };
    let (near, mut far) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    let threshold = ZeroCopyThreshold::new(None);
    let mut full =
        RingStream::new(ring.clone(), near.into(), RegionTable::new(1), threshold).unwrap();
    far.set_nonblocking(true).unwrap();
    for _ in 0..20 {
        let _ = std::io::Write::write(&mut far, &[7; 100_000]);
        full.receive();
        full.arm(true, false);
        full.disarm();
    }
    let free = ring.lock_state().buffers.kernel_owned_count();
    assert!((1..64).contains(&free), "{free} of 64");
    // All of it arrives once it is consumed.
    let mut came = 0;
    for _ in 0..1_000 {
        came += full.buffered().len();
        full.consume(full.buffered().len());
        full.receive();
    }
    assert!(came >= 100_000, "{came}");
}
