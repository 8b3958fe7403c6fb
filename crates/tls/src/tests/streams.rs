//! Streams over sockets: the conformance tests of all streams, and what only TLS has.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tenmil_base::{Memory, RecvResult, Segment, SendSlice, Span, Stream, WakeSource};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::socket::{SocketEngine, SocketOptions, SocketStreamFactory, loopback_pair};
use tenmil_nvme_auth::Hash;
use tenmil_sim::sim_network::stream_conformance_tests::{self, StreamPair, WaitCondition};

use super::{Wire, usual_key};
use crate::session::{ClientConfig, ServerConfig, TlsSession};
use crate::stream::TlsStream;

fn test_memory() -> (RegionTable, Segment) {
    let regions = RegionTable::new(1);
    let mapping = MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap();
    let whole = regions.add_mapping(mapping).unwrap();
    (regions, whole)
}

fn unix_pair() -> [OwnedFd; 2] {
    let (one, other) = UnixStream::pair().unwrap();
    [one.into(), other.into()]
}

/// Client and server over these sockets.
fn tls_pair(
    options: SocketOptions,
    sockets: [OwnedFd; 2],
    hash: Hash,
) -> ([TlsStream; 2], RegionTable, Segment) {
    let (regions, whole) = test_memory();
    let made = SocketStreamFactory::new(regions.clone(), options);
    let [one, other] = sockets.map(|socket| made.new_stream(socket).unwrap());
    let psk = usual_key(hash, 5);
    let client = TlsSession::client(&ClientConfig::with_psks([psk.clone()]).unwrap()).unwrap();
    let server = ServerConfig::with_psks(Arc::new(vec![psk])).unwrap();
    let server = TlsSession::server(&server).unwrap();
    let one = TlsStream::new(one, client, regions.clone());
    let other = TlsStream::new(other, server, regions.clone());
    ([one, other], regions, whole)
}

fn stream_pair(options: SocketOptions, sockets: [OwnedFd; 2], hash: Hash) -> StreamPair {
    let (mut ends, regions, whole) = tls_pair(options, sockets, hash);
    finish_handshake(&mut ends);
    let [one, other] = ends;
    let memory: Arc<dyn Memory> = Arc::new(regions);
    let rest = Box::new(wait_for_either_end);
    StreamPair { one: Box::new(one), other: Box::new(other), memory, whole, rest }
}

/// Sleeps until an event of either end. An end that awaits nothing does not sleep long.
fn wait_for_either_end(ends: [(&mut dyn Stream, WaitCondition); 2]) {
    let watch = PollSet::new().unwrap();
    let (mut stays_awake, mut wants_something) = (false, false);
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

/// Polls both ends until they are open.
fn finish_handshake(ends: &mut [TlsStream; 2]) {
    for _ in 0..1_000 {
        let open = ends.each_mut().map(|end| end.poll_handshake().unwrap());
        if open == [true; 2] {
            return;
        }
        let [one, other] = ends.each_mut().map(|end| end as &mut dyn Stream);
        let bytes = WaitCondition { bytes: true, room: false };
        wait_for_either_end([(one, bytes), (other, bytes)]);
    }
    panic!("the handshake does not end");
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
fn tls_over_tcp_passes_the_stream_tests() {
    for (seed, hash) in [(1, Hash::Sha256), (2, Hash::Sha384)] {
        stream_conformance_tests::run_stream_tests(seed, || {
            stream_pair(SocketOptions::default(), loopback_pair().unwrap(), hash)
        });
    }
}

#[test]
fn tls_over_small_socket_buffers_passes_the_stream_tests() {
    let options = SocketOptions {
        send_buffer_bytes: Some(4096),
        recv_buffer_bytes: 2048,
        ..SocketOptions::default()
    };
    stream_conformance_tests::run_stream_tests(3, || {
        stream_pair(options.clone(), unix_pair(), Hash::Sha256)
    });
}

#[test]
fn tls_over_io_uring_passes_the_stream_tests() {
    if has_ring() {
        stream_conformance_tests::run_stream_tests(4, || {
            stream_pair(io_uring_options(), loopback_pair().unwrap(), Hash::Sha384)
        });
    }
}

#[test]
fn stream_without_bytes_sleeps_although_it_has_received_before() {
    let (mut ends, _, _) =
        tls_pair(SocketOptions::default(), loopback_pair().unwrap(), Hash::Sha256);
    finish_handshake(&mut ends);
    for round in 0..20 {
        let [client, server] = &mut ends;
        let headers = [SendSlice::Headers { at: 0, len_bytes: 3 }];
        assert_eq!(client.send(b"abc", &headers, false), Ok(3));
        assert_eq!(client.released_bytes(), 3 * (round + 1));
        while server.receive() == RecvResult::WouldBlock {
            assert!(!server.arm(true, false), "nothing has been decrypted");
            server.disarm();
        }
        assert_eq!(server.buffered(), b"abc");
        server.consume(3);
        assert_eq!(server.receive(), RecvResult::WouldBlock);
        assert!(!server.arm(true, false), "it sleeps");
        server.disarm();
    }
}

/// Half a record of a peer that does not go on, and a thread with a single receive buffer.
#[test]
fn half_a_record_occupies_no_receive_buffer() {
    let options = SocketOptions { recv_buffers_max: 1, ..SocketOptions::default() };
    let (regions, _) = test_memory();
    let made = SocketStreamFactory::new(regions.clone(), options);
    let psk = usual_key(Hash::Sha256, 5);
    let [mut first, mut second] = std::array::from_fn(|_| {
        let (theirs, ours) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let server = ServerConfig::with_psks(Arc::new(vec![psk.clone()])).unwrap();
        let server = TlsSession::server(&server).unwrap();
        let server = TlsStream::new(made.new_stream(ours.into()).unwrap(), server, regions.clone());
        let client = ClientConfig::with_psks([psk.clone()]).unwrap();
        let client = TlsSession::client(&client).unwrap();
        RawClient { socket: theirs, session: client, wire: Wire::default(), server }
    });
    for end in [&mut first, &mut second] {
        end.handshake();
    }
    let message: Vec<u8> = (0..=255).cycle().take(10_000).collect();
    first.session.send(&mut first.wire, &message).unwrap();
    let records = std::mem::take(&mut first.wire.outward);
    let (half, rest) = records.split_at(5000);
    first.socket.write_all(half).unwrap();
    assert_eq!(first.server.receive(), RecvResult::WouldBlock);
    assert_eq!(first.server.receive(), RecvResult::WouldBlock, "and nothing has followed");
    second.session.send(&mut second.wire, &message).unwrap();
    second.flush();
    assert_eq!(second.server.receive(), RecvResult::Bytes(10_000));
    second.server.consume(10_000);
    first.socket.write_all(rest).unwrap();
    assert_eq!(first.server.receive(), RecvResult::Bytes(10_000));
    assert_eq!(first.server.buffered(), message);

    // A thread that sleeps after half a record has arrived.
    first.server.consume(10_000);
    first.session.send(&mut first.wire, &message).unwrap();
    let records = std::mem::take(&mut first.wire.outward);
    first.socket.write_all(&records[..5000]).unwrap();
    assert_eq!(first.server.receive(), RecvResult::WouldBlock);
    assert!(!first.server.arm(true, false), "half a record is nothing to stay awake for");
    first.server.disarm();
    second.session.send(&mut second.wire, &message).unwrap();
    second.flush();
    assert_eq!(second.server.receive(), RecvResult::Bytes(10_000));
}

/// Client whose records a test sends by parts.
struct RawClient {
    socket: UnixStream,
    session: TlsSession,
    wire: Wire,
    server: TlsStream,
}

impl RawClient {
    fn handshake(&mut self) {
        let mut is_open = [false; 2];
        while is_open != [true; 2] {
            is_open[0] = self.session.handshake(&mut self.wire).unwrap();
            self.flush();
            is_open[1] = self.server.poll_handshake().unwrap();
            self.server.released_bytes();
            let mut part = [0; 4096];
            if let Ok(count) = self.socket.read(&mut part) {
                self.wire.inward.extend_from_slice(&part[..count]);
            }
        }
    }

    fn flush(&mut self) {
        self.socket.write_all(&std::mem::take(&mut self.wire.outward)).unwrap();
    }
}

/// The alert of a violation reaches the peer although nothing is sent any more.
#[test]
fn changed_record_is_told_to_the_peer() {
    let (mut ends, _, _) =
        tls_pair(SocketOptions::default(), loopback_pair().unwrap(), Hash::Sha384);
    finish_handshake(&mut ends);
    let [mut client, mut server] = ends;
    client.break_record(b"changed");
    let end =
        std::iter::repeat_with(|| server.receive()).find(|end| *end != RecvResult::WouldBlock);
    let Some(RecvResult::Failed(error)) = end else { panic!("{end:?}") };
    assert!(error.to_string().contains("not authentic"), "{error}");
    drop(server);
    let end =
        std::iter::repeat_with(|| client.receive()).find(|end| *end != RecvResult::WouldBlock);
    let Some(RecvResult::Failed(error)) = end else { panic!("{end:?}") };
    assert!(error.to_string().contains("alert bad_record_mac"), "{error}");
}

#[test]
fn decrypted_rest_of_a_record_keeps_its_thread_awake() {
    let (mut ends, regions, whole) =
        tls_pair(SocketOptions::default(), loopback_pair().unwrap(), Hash::Sha256);
    finish_handshake(&mut ends);
    let [client, server] = &mut ends;
    let message: Vec<u8> = (0..100).collect();
    let headers = [SendSlice::Headers { at: 0, len_bytes: 100 }];
    assert_eq!(client.send(&message, &headers, false), Ok(100));
    while server.receive_up_to(10) == RecvResult::WouldBlock {}
    assert_eq!(server.buffered(), &message[..10]);
    assert!(server.arm(true, false), "90 bytes are known");
    server.disarm();
    assert!(!server.arm(false, false), "the caller wants no bytes");
    server.disarm();
    server.consume(10);
    let into = whole.slice(0, 50).unwrap();
    assert_eq!(server.receive_into_and_following(&[into], 8), RecvResult::Bytes(58));
    let mut received = vec![0; 50];
    regions.load(into, &mut received).unwrap();
    assert_eq!(received, &message[10..60]);
    assert_eq!(server.buffered(), &message[60..68]);
    assert_eq!(server.receive(), RecvResult::Bytes(32));
    assert_eq!(server.buffered(), &message[60..]);
}

#[test]
fn stream_moves_to_another_thread_with_what_it_has_received() {
    let (mut ends, _, _) =
        tls_pair(SocketOptions::default(), loopback_pair().unwrap(), Hash::Sha384);
    finish_handshake(&mut ends);
    let [mut client, mut server] = ends;
    let headers = [SendSlice::Headers { at: 0, len_bytes: 6 }];
    assert_eq!(client.send(b"before", &headers, false), Ok(6));
    while server.receive_up_to(2) == RecvResult::WouldBlock {}
    assert!(server.detach_from_thread());
    let move_it = move || {
        assert_eq!(server.receive(), RecvResult::Bytes(4));
        assert_eq!(server.buffered(), b"before");
        let headers = [SendSlice::Headers { at: 0, len_bytes: 5 }];
        assert_eq!(server.send(b"after", &headers, false), Ok(5));
        server
    };
    let server = std::thread::scope(|scope| scope.spawn(move_it).join().unwrap());
    while client.receive() == RecvResult::WouldBlock {}
    assert_eq!(client.buffered(), b"after");
    drop(server);
    let end =
        std::iter::repeat_with(|| client.receive()).find(|end| *end != RecvResult::WouldBlock);
    assert_eq!(end, Some(RecvResult::Eof), "a dropped stream announces its end");
}

#[test]
fn aborted_stream_is_no_orderly_end() {
    let (mut ends, _, _) =
        tls_pair(SocketOptions::default(), loopback_pair().unwrap(), Hash::Sha256);
    finish_handshake(&mut ends);
    let [mut client, mut server] = ends;
    server.abort();
    drop(server);
    let end =
        std::iter::repeat_with(|| client.receive()).find(|end| *end != RecvResult::WouldBlock);
    assert!(matches!(end, Some(RecvResult::Failed(_))), "{end:?}");
}

#[test]
fn stream_that_is_shut_down_during_the_handshake_ends_after_it() {
    let (ends, _, _) = tls_pair(SocketOptions::default(), loopback_pair().unwrap(), Hash::Sha256);
    let [mut client, mut server] = ends;
    client.shutdown_write();
    let headers = [SendSlice::Headers { at: 0, len_bytes: 6 }];
    assert!(client.send(b"closed", &headers, false).is_err());
    let end = std::iter::repeat_with(|| {
        assert_eq!(client.receive(), RecvResult::WouldBlock);
        server.receive()
    });
    assert_eq!(end.into_iter().find(|end| *end != RecvResult::WouldBlock), Some(RecvResult::Eof));
    assert_eq!(server.send(b"answer", &headers, false), Ok(6));
    while client.receive() == RecvResult::WouldBlock {}
    assert_eq!(client.buffered(), b"answer");
}

#[test]
fn polling_alone_ends_the_handshake() {
    let (mut ends, ..) = tls_pair(SocketOptions::default(), unix_pair(), Hash::Sha256);
    let mut rounds = 0..10;
    while ends.each_mut().map(|end| end.poll_handshake().unwrap()) != [true; 2] {
        assert!(rounds.next().is_some(), "what one end has sent does not arrive");
    }
}

#[test]
fn failed_handshake_is_an_error_of_both_directions() {
    let (regions, _) = test_memory();
    let made = SocketStreamFactory::new(regions.clone(), SocketOptions::default());
    let [one, other] = loopback_pair().unwrap().map(|socket| made.new_stream(socket).unwrap());
    let client = ClientConfig::with_psks([usual_key(Hash::Sha256, 1)]).unwrap();
    let client = TlsSession::client(&client).unwrap();
    let server = ServerConfig::with_psks(Arc::new(vec![usual_key(Hash::Sha256, 2)])).unwrap();
    let server = TlsSession::server(&server).unwrap();
    let mut client = TlsStream::new(one, client, regions.clone());
    let mut server = TlsStream::new(other, server, regions);
    let headers = [SendSlice::Headers { at: 0, len_bytes: 1 }];
    assert_eq!(client.send(b"x", &headers, false), Ok(0), "nothing is accepted before it");
    let mut result = || {
        let end = server.receive();
        (end != RecvResult::WouldBlock).then_some(end)
    };
    let Some(RecvResult::Failed(error)) = std::iter::repeat_with(&mut result).flatten().next()
    else {
        panic!("the server accepts an unknown identity")
    };
    assert!(error.to_string().contains("no key for identity \"NVMe1R01"), "{error}");
    assert_eq!(server.send(b"x", &headers, false), Err(error));
    let end =
        std::iter::repeat_with(|| client.receive()).find(|end| *end != RecvResult::WouldBlock);
    let Some(RecvResult::Failed(error)) = end else { panic!("{end:?}") };
    assert!(error.to_string().contains("unknown_psk_identity"), "{error}");
    assert!(error.to_string().contains("libnvme before 1.15"), "{error}");
    assert_eq!(client.send(b"x", &headers, false), Err(error));
}
