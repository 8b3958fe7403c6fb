//! In-memory connection between a peer and the service, and a device whose completions may be
//! delayed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, Limits, MediumMemory,
    Memory, RecvResult, Request, Segment, SendSlice, Stream, StreamError, WakeSource,
};
use tenmil_dma::RegionTable;
use tenmil_drivers::RamDevice;

/// State of one direction of a connection.
#[derive(Debug, Default)]
pub(super) struct PipeBuffer {
    pub(super) bytes: Vec<u8>,
    pub(super) is_closed: bool,
}

/// One direction of a connection, shared by both ends.
#[derive(Clone, Debug, Default)]
pub(super) struct PipeDirection(Arc<Mutex<PipeBuffer>>);

impl PipeDirection {
    pub(super) fn lock(&self) -> MutexGuard<'_, PipeBuffer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// End of the service.
pub(super) struct SimulatedStream {
    regions: RegionTable,
    pub(super) up: PipeDirection,
    pub(super) down: PipeDirection,
    inbox: Vec<u8>,
    sent: u64,
    /// Largest number of bytes of one receive.
    piece: usize,
    peer: String,
}

/// Largest number of bytes buffered for a peer.
const ROOM: usize = 48 << 10;
const INBOX: usize = 16 << 10;

impl SimulatedStream {
    pub(super) fn new(regions: &RegionTable, piece: usize, peer: String) -> Self {
        let (up, down) = (PipeDirection::default(), PipeDirection::default());
        Self { regions: regions.clone(), up, down, inbox: Vec::new(), sent: 0, piece, peer }
    }
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        self.up.lock().is_closed = true;
        self.down.lock().is_closed = true;
    }
}

impl Stream for SimulatedStream {
    fn receive(&mut self) -> RecvResult {
        let mut half = self.up.lock();
        let count = half.bytes.len().min(self.piece).min(INBOX - self.inbox.len().min(INBOX));
        self.inbox.extend(half.bytes.drain(..count));
        match count {
            0 if half.is_closed && half.bytes.is_empty() => RecvResult::Eof,
            0 => RecvResult::WouldBlock,
            count => RecvResult::Bytes(count),
        }
    }

    fn buffered(&self) -> &[u8] {
        &self.inbox
    }

    fn consume(&mut self, count: usize) {
        self.inbox.drain(..count);
    }

    fn receive_into(&mut self, into: &[Segment]) -> RecvResult {
        self.receive_into_and_following(into, 0)
    }

    fn receive_into_and_following(&mut self, into: &[Segment], following: usize) -> RecvResult {
        let mut half = self.up.lock();
        let Some(first) = into.first() else { return RecvResult::WouldBlock };
        let len = first.len_bytes as usize;
        let count = half.bytes.len().min(len + following).min(self.piece);
        if count == 0 {
            return if half.is_closed { RecvResult::Eof } else { RecvResult::WouldBlock };
        }
        let mut bytes: Vec<u8> = half.bytes.drain(..count).collect();
        self.inbox = bytes.split_off(count.min(len));
        let place = Segment { len_bytes: u32::try_from(bytes.len()).unwrap_or(0), ..*first };
        self.regions.store(place, &bytes).expect("a buffer lies in the budget's region");
        RecvResult::Bytes(count)
    }

    fn send(
        &mut self,
        headers: &[u8],
        slices: &[SendSlice],
        _: bool,
    ) -> Result<usize, StreamError> {
        let mut half = self.down.lock();
        if half.is_closed {
            return Err(StreamError("the pipe is closed".to_owned()));
        }
        let mut bytes = Vec::new();
        for stretch in slices {
            match *stretch {
                SendSlice::Headers { at, len_bytes } => {
                    bytes.extend(&headers[at as usize..][..len_bytes as usize]);
                }
                SendSlice::Memory(segment) => {
                    let mut part = vec![0; segment.len_bytes as usize];
                    self.regions.load(segment, &mut part).expect("a buffer lies in a region");
                    bytes.extend(part);
                }
            }
        }
        bytes.truncate(ROOM.saturating_sub(half.bytes.len()));
        self.sent += bytes.len() as u64;
        half.bytes.extend(&bytes);
        Ok(bytes.len())
    }

    fn released_bytes(&mut self) -> u64 {
        self.sent
    }

    fn shutdown_write(&mut self) {
        self.down.lock().is_closed = true;
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }

    fn arm(&mut self, _: bool, _: bool) -> bool {
        false
    }

    fn peer_description(&self) -> String {
        self.peer.clone()
    }
}

/// RAM device that completes nothing while `is_stuck` is set.
pub(super) struct DelayedDevice {
    pub(super) ram: Arc<RamDevice>,
    pub(super) is_stuck: Arc<AtomicBool>,
}

struct DelayedChannel {
    channel: Box<dyn IoChannel>,
    is_stuck: Arc<AtomicBool>,
}

impl BlockDevice for DelayedDevice {
    fn limits(&self) -> Limits {
        self.ram.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let (channel, is_stuck) = (self.ram.channel()?, Arc::clone(&self.is_stuck));
        Ok(Box::new(DelayedChannel { channel, is_stuck }))
    }

    fn medium_memory(&self) -> Option<MediumMemory> {
        self.ram.medium_memory()
    }
}

impl IoChannel for DelayedChannel {
    fn limits(&self) -> &Limits {
        self.channel.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.channel.submit(now, requests, segments)
    }

    fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
        if self.is_stuck.load(Ordering::Relaxed) { 0 } else { self.channel.poll(now, answers) }
    }
}

impl ChannelWakeup for DelayedChannel {}
