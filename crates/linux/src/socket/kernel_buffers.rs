//! Transfers between a socket and kernel-owned buffers (ublk zero copy); the data has no address in
//! this process.
//!
//! ```text
//!   register: request → place in the ring's table ─▶ to or from the socket, by that place ─▶ unregister
//! ```
//!
//! All three entries have completed when the call returns: none of them waits (`RWF_NOWAIT`), and
//! sent data has been copied into the socket by the kernel. So between two calls no part of a
//! request is in use, however its connection ends.
//!
//! Where the kernel refuses this, the data is copied through memory of this process.

use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use tenmil_base::{Memory, Segment};
use tenmil_dma::{KernelBufferSlice, RegionTable};
use tenmil_wire::ublk::QueueOp;

use crate::uring_engine::buffer_entry;

/// Moves kernel-owned buffers for one socket.
#[derive(Default)]
pub(super) struct KernelBufferTransfer {
    ring: FixedBufferRing,
    /// Number of refusals by the kernel.
    refusals: u32,
    /// Copy buffer.
    bytes: Vec<u8>,
}

/// Ring with one place for a registered buffer.
#[derive(Default)]
enum FixedBufferRing {
    /// Not created, because not needed yet.
    #[default]
    NotCreated,
    Ready(Box<IoUring>),
    /// The kernel refused the ring, or too many transfers.
    Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferDirection {
    ToSocket,
    FromSocket,
}

/// Results of the entries of a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TransferResult {
    /// Error of the registration.
    refused: Option<i32>,
    /// Result of the transfer.
    transferred: Option<i32>,
}

/// Index in the ring's buffer table.
const BUFFER_INDEX: u16 = 0;
/// `user_data` of the entries.
const REGISTER: u64 = 1;
const MOVE: u64 = 2;
const UNREGISTER: u64 = 3;
/// Refusals after which everything is copied.
const REFUSALS_MAX: u32 = 16;
/// Bytes copied at a time.
const COPY_BYTES_MAX: u32 = 64 << 10;

impl KernelBufferTransfer {
    /// Sends from `segment`, a kernel-owned buffer. Returns the number of bytes, or the error:
    /// `AGAIN` if the socket has no space, `IO` if the buffer was freed.
    pub(super) fn send(
        &mut self,
        regions: &RegionTable,
        segment: Segment,
        socket: BorrowedFd<'_>,
        has_more: bool,
    ) -> Result<usize, Errno> {
        match self.transfer_registered_buffer(regions, segment, socket, TransferDirection::ToSocket)
        {
            Some(transferred) => transferred,
            None => self.send_copied(regions, segment, socket, has_more),
        }
    }

    /// Receives into `segment`, a kernel-owned buffer. Returns the number of bytes, zero at the end
    /// of the stream, or the error as for sending.
    pub(super) fn receive(
        &mut self,
        regions: &RegionTable,
        segment: Segment,
        socket: BorrowedFd<'_>,
    ) -> Result<usize, Errno> {
        match self.transfer_registered_buffer(
            regions,
            segment,
            socket,
            TransferDirection::FromSocket,
        ) {
            Some(transferred) => transferred,
            None => self.receive_copied(regions, segment, socket),
        }
    }

    /// Transfers by registered buffer; `None` if the kernel does not support it.
    fn transfer_registered_buffer(
        &mut self,
        regions: &RegionTable,
        segment: Segment,
        socket: BorrowedFd<'_>,
        way: TransferDirection,
    ) -> Option<Result<usize, Errno>> {
        let part = regions.kernel_buffer(segment)?;
        let ring = self.ring_for_registered_buffer()?;
        let ending = match submit_and_wait(ring, &linked_entries(socket, &part, way)) {
            Ok(ending) => ending,
            Err(errno) => {
                // Entries that were not submitted are dropped with the ring.
                self.ring = FixedBufferRing::NotCreated;
                return Some(Err(errno));
            }
        };
        let result_of = ending.result_of(part.len_bytes);
        if result_of.is_none() {
            self.refusals += 1;
            if self.refusals == REFUSALS_MAX {
                self.ring = FixedBufferRing::Refused;
            }
        }
        result_of
    }

    fn ring_for_registered_buffer(&mut self) -> Option<&mut IoUring> {
        if let FixedBufferRing::NotCreated = self.ring {
            self.ring = match open_ring() {
                Ok(ring) => FixedBufferRing::Ready(Box::new(ring)),
                Err(_) => FixedBufferRing::Refused,
            };
        }
        match &mut self.ring {
            FixedBufferRing::Ready(ring) => Some(ring),
            FixedBufferRing::NotCreated | FixedBufferRing::Refused => None,
        }
    }

    fn send_copied(
        &mut self,
        regions: &RegionTable,
        segment: Segment,
        socket: BorrowedFd<'_>,
        has_more: bool,
    ) -> Result<usize, Errno> {
        let len_bytes = segment.len_bytes.min(COPY_BYTES_MAX);
        let part = segment.slice(0, len_bytes).ok_or(Errno::IO)?;
        self.bytes.resize(len_bytes as usize, 0);
        regions.load(part, &mut self.bytes).map_err(|_| Errno::IO)?;
        let mut flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        flags.set(SendFlags::MORE, has_more || len_bytes < segment.len_bytes);
        rustix::net::send(socket, &self.bytes, flags)
    }

    fn receive_copied(
        &mut self,
        regions: &RegionTable,
        segment: Segment,
        socket: BorrowedFd<'_>,
    ) -> Result<usize, Errno> {
        self.bytes.resize(segment.len_bytes.min(COPY_BYTES_MAX) as usize, 0);
        let (count, _) = rustix::net::recv(socket, &mut self.bytes[..], RecvFlags::DONTWAIT)?;
        let part = u32::try_from(count).ok().and_then(|count| segment.slice(0, count));
        regions.store(part.ok_or(Errno::IO)?, &self.bytes[..count]).map_err(|_| Errno::IO)?;
        Ok(count)
    }
}

impl TransferResult {
    /// Result of a transfer of `len_bytes`; `None` if the kernel does not support it.
    fn result_of(self, len_bytes: u32) -> Option<Result<usize, Errno>> {
        let transferred = self.transferred.filter(|_| self.refused.is_none())?;
        let Ok(count) = u32::try_from(transferred) else {
            let errno = Errno::from_raw_os_error(-transferred);
            let is_refused = matches!(errno, Errno::INVAL | Errno::OPNOTSUPP | Errno::FAULT);
            return (!is_refused).then_some(Err(errno));
        };
        Some(if count <= len_bytes { Ok(count as usize) } else { Err(Errno::IO) })
    }
}

fn open_ring() -> Result<IoUring, std::io::Error> {
    // With cooperative task running, the kernel works when it is entered, that is while a caller
    // waits.
    let ring = IoUring::builder().setup_coop_taskrun().build(4)?;
    ring.submitter().register_buffers_sparse(u32::from(BUFFER_INDEX) + 1)?;
    Ok(ring)
}

/// Hard-linked entries: each waits for the one before and none is skipped after a failure, so a
/// registered buffer is always unregistered.
fn linked_entries(
    socket: BorrowedFd<'_>,
    part: &KernelBufferSlice<'_>,
    way: TransferDirection,
) -> [squeue::Entry; 3] {
    let after_it = squeue::Flags::IO_HARDLINK;
    let lender = part.descriptor.as_raw_fd();
    let ask = |op| buffer_entry(lender, (part.queue, part.request), op, BUFFER_INDEX);
    let quiet = squeue::Flags::SKIP_SUCCESS;
    [
        ask(QueueOp::RegisterBuffer).flags(after_it | quiet).user_data(REGISTER),
        transfer_entry(socket, (part.byte as usize, part.len_bytes), way).flags(after_it),
        ask(QueueOp::UnregisterBuffer).user_data(UNREGISTER),
    ]
}

/// Entry that transfers part of the registered buffer. `first` is the offset in it: a ublk buffer
/// starts at address zero.
fn transfer_entry(
    socket: BorrowedFd<'_>,
    (first, len_bytes): (usize, u32),
    way: TransferDirection,
) -> squeue::Entry {
    let socket = types::Fd(socket.as_raw_fd());
    let first = std::ptr::without_provenance_mut::<u8>(first);
    let entry = match way {
        // Without MSG_NOSIGNAL: Rust programs ignore SIGPIPE.
        TransferDirection::ToSocket => {
            opcode::WriteFixed::new(socket, first, len_bytes, BUFFER_INDEX)
                .rw_flags(libc::RWF_NOWAIT)
                .build()
        }
        TransferDirection::FromSocket => {
            opcode::ReadFixed::new(socket, first, len_bytes, BUFFER_INDEX)
                .rw_flags(libc::RWF_NOWAIT)
                .build()
        }
    };
    entry.user_data(MOVE)
}

/// Submits `entries`, of which the last one always completes visibly, and waits for their
/// completion.
fn submit_and_wait(ring: &mut IoUring, entries: &[squeue::Entry]) -> Result<TransferResult, Errno> {
    // SAFETY: the entries name no memory of this process, but a place in the ring's own table; the
    // socket and the ublk device, which the caller keeps open until all of them have completed.
    let pushed = unsafe { ring.submission().push_multiple(entries) };
    pushed.map_err(|_| Errno::BUSY)?;
    // All entries but the registration post a completion; the registration posts one only on
    // failure.
    let mut left = entries.len() - usize::from(entries.len() > 1);
    let mut ending = TransferResult::default();
    while left > 0 {
        match ring.submit_and_wait(left).map_err(|error| super::socket_ring::errno_of(&error)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        for entry in ring.completion() {
            match entry.user_data() {
                REGISTER => ending.refused = Some(entry.result()),
                MOVE => (ending.transferred, left) = (Some(entry.result()), left.saturating_sub(1)),
                _ => left = left.saturating_sub(1),
            }
        }
    }
    Ok(ending)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use io_uring::IoUring;
    use rustix::io::Errno;
    use tenmil_base::{Memory, Span};
    use tenmil_dma::{KernelBufferSource, Region, RegionTable};

    use super::{
        BUFFER_INDEX, FixedBufferRing, KernelBufferTransfer, MOVE, REGISTER, TransferDirection,
        TransferResult, UNREGISTER, linked_entries, open_ring, submit_and_wait, transfer_entry,
    };

    /// One page, since other tests share the limit of locked memory.
    const LEN: usize = 4096;

    fn socket_pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    /// Region memory registered in the ring's place, instead of a ublk buffer.
    struct Placed {
        ring: IoUring,
        memory: Region,
        regions: RegionTable,
    }

    impl Placed {
        fn new(bytes: &[u8]) -> Option<Self> {
            let Ok(ring) = open_ring() else {
                println!("skipped: io_uring is not allowed here");
                return None;
            };
            let regions = RegionTable::new(1);
            let memory = regions.allocate_region(bytes.len()).unwrap();
            regions.store(memory.segment(), bytes).unwrap();
            let address = regions.host_address(memory.segment()).unwrap();
            let whole = libc::iovec { iov_base: address.as_ptr().cast(), iov_len: bytes.len() };
            let place = || {
                // SAFETY: region memory, which the regions beside the ring keep mapped.
                unsafe {
                    ring.submitter().register_buffers_update(BUFFER_INDEX.into(), &[whole], None)
                }
            };
            // Other tests that hold locked memory release it soon.
            let mut placed = place();
            for _ in 0..5000 {
                if placed.is_ok() {
                    break;
                }
                crate::named_thread::sleep(Span::from_ms(1));
                placed = place();
            }
            if let Err(why) = placed {
                assert_eq!(why.raw_os_error(), Some(libc::ENOMEM), "{why}");
                println!("skipped: not a page may be locked here");
                return None;
            }
            Some(Self { ring, memory, regions })
        }

        fn submit_and_wait(
            &mut self,
            socket: &TcpStream,
            at: u32,
            len: u32,
            way: TransferDirection,
        ) -> Result<usize, Errno> {
            let first = self.memory.segment().slice(at, len).unwrap();
            let first = self.regions.host_address(first).unwrap().addr().get();
            let ending = submit_and_wait(
                &mut self.ring,
                &[transfer_entry(socket.as_fd(), (first, len), way)],
            );
            ending.unwrap().result_of(len).unwrap()
        }

        fn test_bytes(&self) -> Vec<u8> {
            let mut bytes = vec![0; self.memory.segment().len_bytes as usize];
            self.regions.load(self.memory.segment(), &mut bytes).unwrap();
            bytes
        }
    }

    #[test]
    fn kernel_buffer_is_sent_as_far_as_the_socket_accepts_without_blocking() {
        let expected: Vec<u8> = (0..LEN).map(|at| (at % 251).to_le_bytes()[0]).collect();
        let Some(mut placed) = Placed::new(&expected) else { return };
        let (one, mut other) = socket_pair();
        let (mut sent, mut got, mut is_full) = (1000_usize, Vec::new(), false);
        // Repeated until the sockets are full, then the rest of a round.
        while !is_full || !sent.is_multiple_of(LEN) {
            let at = sent % LEN;
            let (from, left) = (u32::try_from(at).unwrap(), u32::try_from(LEN - at).unwrap());
            match placed.submit_and_wait(&one, from, left, TransferDirection::ToSocket) {
                Ok(count) => sent += count,
                Err(errno) => {
                    assert_eq!(errno, Errno::AGAIN);
                    is_full = true;
                    let mut some = vec![0; 100_000];
                    let count = other.read(&mut some).unwrap();
                    got.extend_from_slice(&some[..count]);
                }
            }
        }
        drop(one);
        other.read_to_end(&mut got).unwrap();
        let whole: Vec<u8> = expected.iter().cycle().take(sent).skip(1000).copied().collect();
        assert!(got == whole, "{} bytes of {}", got.len(), whole.len());
    }

    #[test]
    fn received_bytes_fill_the_kernel_buffer_and_no_more() {
        let Some(mut placed) = Placed::new(&[0; 4096]) else { return };
        let (one, mut other) = socket_pair();
        let mut take =
            |(at, len)| placed.submit_and_wait(&one, at, len, TransferDirection::FromSocket);
        assert_eq!(take((0, 100)), Err(Errno::AGAIN));
        other.write_all(b"head and body").unwrap();
        assert_eq!(take((512, 4)), Ok(4));
        assert_eq!(take((1024, 100)), Ok(9));
        assert_eq!(take((1024, 100)), Err(Errno::AGAIN));
        drop(other);
        assert_eq!(take((0, 100)), Ok(0), "the end");
        let memory = placed.test_bytes();
        assert_eq!((&memory[512..516], &memory[1024..1033]), (&b"head"[..], &b" and body"[..]));
        assert!(memory[..512].iter().chain(&memory[1033..]).all(|byte| *byte == 0));
    }

    #[test]
    fn closed_peer_is_an_error_without_sigpipe() {
        let Some(mut placed) = Placed::new(&[1; 4096]) else { return };
        let (one, other) = socket_pair();
        crate::socket::reset_on_close(other.as_fd());
        drop(other);
        let mut last = Ok(0);
        for _ in 0..3 {
            last = placed.submit_and_wait(&one, 0, 4096, TransferDirection::ToSocket);
        }
        assert!(matches!(last, Err(Errno::PIPE | Errno::CONNRESET)), "{last:?}");
    }

    #[test]
    fn register_transfer_unregister_are_linked_and_always_unregister() {
        let regions = RegionTable::new(1);
        let descriptor = std::io::pipe().unwrap().0.into();
        let lender = KernelBufferSource { descriptor, queue: 2, data_at: |_, _, _| 0 };
        let leased = regions.register_kernel_buffers(lender, (4, 8192)).unwrap();
        let part = regions.kernel_buffer(leased.slice(3 * 8192 + 512, 1024).unwrap()).unwrap();
        let (hard_link, skip_success, nowait) = (1 << 3, 1 << 6, 8_u32);
        let (one, _other) = socket_pair();
        for (way, opcode) in [(TransferDirection::FromSocket, 4), (TransferDirection::ToSocket, 5)]
        {
            let steps = linked_entries(one.as_fd(), &part, way).map(|entry| {
                assert_eq!(size_of_val(&entry), 64);
                // SAFETY: the entry is 64 bytes long and alive, and bytes need no alignment.
                unsafe { (&raw const entry).cast::<[u8; 64]>().read() }
            });
            let long = |step: &[u8; 64], at: usize| {
                u64::from_ne_bytes(step[at..at + 8].try_into().unwrap())
            };
            assert_eq!(steps.map(|step| step[0]), [46, opcode, 46]);
            assert_eq!(steps.map(|step| step[1]), [hard_link | skip_success, hard_link, 0]);
            assert_eq!(steps.map(|step| long(&step, 32)), [REGISTER, MOVE, UNREGISTER]);
            let [register, moves, back] = steps;
            assert_eq!(register[48..], back[48..], "queue, tag, result, place");
            assert_eq!(register[48..52], [2, 0, 3, 0]);
            assert_eq!((long(&moves, 16), long(&moves, 24)), (512, 1024 | u64::from(nowait) << 32));
        }
    }

    #[test]
    fn kernel_errors_are_reported_and_unsupported_operations_copied() {
        let ended = |refused, transferred| TransferResult { refused, transferred }.result_of(100);
        assert_eq!(ended(None, Some(100)), Some(Ok(100)));
        assert_eq!(ended(None, Some(0)), Some(Ok(0)));
        assert_eq!(ended(None, Some(101)), Some(Err(Errno::IO)), "more than there was");
        for errno in [Errno::AGAIN, Errno::PIPE, Errno::CONNRESET] {
            assert_eq!(ended(None, Some(-errno.raw_os_error())), Some(Err(errno)));
        }
        for errno in [Errno::INVAL, Errno::OPNOTSUPP, Errno::FAULT] {
            assert_eq!(ended(None, Some(-errno.raw_os_error())), None);
        }
        assert_eq!(ended(Some(-22), Some(-14)), None, "it was not lent");
        assert_eq!(ended(Some(-22), Some(100)), None);
        assert_eq!(ended(None, None), None);
    }

    #[test]
    fn repeated_rejections_disable_kernel_buffer_transfers() {
        let regions = RegionTable::new(1);
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let data_at = |_, request, byte| 4096 * u64::from(request) + u64::from(byte);
        let lender = KernelBufferSource { descriptor: file.into(), queue: 0, data_at };
        let leased = regions.register_kernel_buffers(lender, (2, 4096)).unwrap();
        let part = leased.slice(0, 512).unwrap();
        regions.store(part, &[5; 512]).unwrap();
        let ((one, mut other), mut mover) = (socket_pair(), KernelBufferTransfer::default());
        for round in 1..=20 {
            assert_eq!(mover.send(&regions, part, one.as_fd(), false), Ok(512));
            let mut bytes = [0; 512];
            other.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes, [5; 512]);
            let has_ring = matches!(mover.ring, FixedBufferRing::Ready(_));
            assert!(!has_ring || round < 16, "{round}");
        }
        assert!(matches!(mover.ring, FixedBufferRing::Refused));
        let gone = leased.slice(4096, 4096).unwrap();
        rustix::fs::ftruncate(regions.kernel_buffer(gone).unwrap().descriptor, 4096).unwrap();
        assert_eq!(mover.send(&regions, gone, one.as_fd(), false), Err(Errno::IO));
        assert_eq!(regions.copied_bytes(leased.region), 21 * 512);
    }
}
