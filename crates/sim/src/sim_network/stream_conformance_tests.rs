//! Conformance tests for every implementation of [`Stream`].

use std::collections::VecDeque;
use std::sync::Arc;

use tenmil_base::{Memory, Random, RecvResult, RegionId, Segment, SendSlice, Stream};

/// Two connected streams, and the memory they send from and receive into.
pub struct StreamPair {
    /// First end.
    pub one: Box<dyn Stream>,
    /// Second end.
    pub other: Box<dyn Stream>,
    /// Memory of all segments.
    pub memory: Arc<dyn Memory>,
    /// The whole memory, at least 1 MiB.
    pub whole: Segment,
    /// Waits for progress: sleeps until a stream is ready, or advances simulated time.
    pub rest: WaitFn,
}

/// Wait function of a pair. Its arguments are both ends and what each of them waits for.
pub type WaitFn = Box<dyn FnMut([(&mut dyn Stream, WaitCondition); 2])>;

/// Condition that an end waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitCondition {
    /// Data to receive.
    pub bytes: bool,
    /// Space to send.
    pub room: bool,
}

const BYTES: WaitCondition = WaitCondition { bytes: true, room: false };
const ROOM: WaitCondition = WaitCondition { bytes: false, room: true };
const NOTHING: WaitCondition = WaitCondition { bytes: false, room: false };
/// Maximum number of waits until something must have happened.
const RESTS_MAX: usize = 100_000;

/// Runs all tests with new pairs and random numbers drawn from `seed`.
///
/// # Panics
///
/// If a test fails.
pub fn run_stream_tests(seed: u64, mut make: impl FnMut() -> StreamPair) {
    receive_before_send_returns_nothing(make());
    headers_and_segments_arrive_in_order(make());
    bytes_are_received_directly_into_segments(make());
    following_bytes_are_buffered_behind_segments(make());
    consumed_bytes_are_removed_and_the_rest_stays(make());
    stream_end_follows_the_sent_data(make());
    one_direction_may_end_before_the_other(make());
    peer_that_does_not_receive_stops_its_sender(make());
    closed_peer_is_noticed(make());
    released_memory_may_be_reused(make());
    invalid_segment_is_rejected(make());
    for step in 0..3 {
        large_transfers_in_both_directions_are_exact(seed.wrapping_add(step), make());
    }
}

impl StreamPair {
    fn wait_for(&mut self, one: WaitCondition, other: WaitCondition) {
        (self.rest)([(self.one.as_mut(), one), (self.other.as_mut(), other)]);
    }

    /// Swaps the two ends.
    fn swapped(self) -> Self {
        let Self { one, other, memory, whole, mut rest } = self;
        let turned =
            move |[first, second]: [(&mut dyn Stream, WaitCondition); 2]| rest([second, first]);
        Self { one: other, other: one, memory, whole, rest: Box::new(turned) }
    }

    fn segment_at(&self, from: u32, len: u32) -> Segment {
        self.whole.slice(from, len).expect("the memory is long enough")
    }

    fn load_segment(&self, segment: Segment) -> Vec<u8> {
        let mut bytes = vec![0; segment.len_bytes as usize];
        self.memory.load(segment, &mut bytes).expect("it lies in the memory");
        bytes
    }

    fn store_segment(&self, segment: Segment, bytes: &[u8]) {
        self.memory.store(segment, bytes).expect("it lies in the memory");
    }

    /// Sends bytes from `one` as headers.
    fn send(&mut self, bytes: &[u8]) {
        let mut sent = 0;
        for _ in 0..RESTS_MAX {
            let (at, len_bytes) = (len_u32(sent), len_u32(bytes.len() - sent));
            let stretch = SendSlice::Headers { at, len_bytes };
            sent += self.one.send(bytes, &[stretch], false).expect("it is connected");
            if sent == bytes.len() {
                return;
            }
            self.wait_for(ROOM, NOTHING);
        }
        panic!("there is never room");
    }

    /// Receives at `other` until `len` bytes are buffered.
    fn receive_until_buffered(&mut self, len: usize) {
        for _ in 0..RESTS_MAX {
            if self.other.buffered().len() >= len {
                return;
            }
            match self.other.receive() {
                RecvResult::Bytes(_) => {}
                RecvResult::WouldBlock => self.wait_for(NOTHING, BYTES),
                over => panic!("{over:?} before {len} bytes"),
            }
        }
        panic!("{len} bytes never come");
    }

    /// Receives at `other` until there is a result other than `Nothing`.
    fn receive_until_result(&mut self) -> RecvResult {
        for _ in 0..RESTS_MAX {
            match self.other.receive() {
                RecvResult::WouldBlock => self.wait_for(NOTHING, BYTES),
                received => return received,
            }
        }
        panic!("nothing ever comes");
    }
}

fn len_u32(len: usize) -> u32 {
    u32::try_from(len).expect("it is a length in a test")
}

fn receive_before_send_returns_nothing(mut pair: StreamPair) {
    assert_eq!(pair.one.receive(), RecvResult::WouldBlock);
    assert_eq!(pair.other.receive_into(&[pair.whole]), RecvResult::WouldBlock);
    assert_eq!(pair.one.buffered(), b"");
    assert_eq!(pair.one.released_bytes(), 0);
    assert_eq!(pair.one.send(b"", &[], false), Ok(0));
    assert!(!pair.one.arm(true, false), "there is nothing to stay awake for");
    pair.one.disarm();
    assert!(!pair.one.peer_description().is_empty());
    assert_eq!(pair.one.receive(), RecvResult::WouldBlock);
}

fn headers_and_segments_arrive_in_order(mut pair: StreamPair) {
    pair.store_segment(pair.segment_at(100, 8), b"ABCDEFGH");
    let stretches = [
        SendSlice::Headers { at: 2, len_bytes: 2 },
        SendSlice::Memory(pair.segment_at(104, 3)),
        SendSlice::Memory(pair.segment_at(100, 2)),
        SendSlice::Headers { at: 0, len_bytes: 0 },
        SendSlice::Headers { at: 0, len_bytes: 1 },
    ];
    let mut rest: VecDeque<SendSlice> = stretches.into();
    for _ in 0..RESTS_MAX {
        if rest.is_empty() {
            break;
        }
        let sent = pair.one.send(b"abcd", rest.make_contiguous(), true);
        advance_slices(&mut rest, sent.expect("it is connected"));
        pair.wait_for(ROOM, NOTHING);
    }
    pair.send(b"!");
    pair.receive_until_buffered(9);
    assert_eq!(pair.other.buffered(), b"cdEFGABa!");
}

/// Removes the first `sent` bytes.
fn advance_slices(stretches: &mut VecDeque<SendSlice>, sent: usize) {
    let mut sent = len_u32(sent);
    while let Some(first) = stretches.front_mut() {
        let len = match *first {
            SendSlice::Headers { len_bytes, .. } => len_bytes,
            SendSlice::Memory(segment) => segment.len_bytes,
        };
        if sent < len {
            match first {
                SendSlice::Headers { at, len_bytes } => {
                    (*at, *len_bytes) = (*at + sent, len - sent)
                }
                SendSlice::Memory(segment) => {
                    *segment = segment.slice(sent, len - sent).expect("it is shorter");
                }
            }
            return;
        }
        sent -= len;
        stretches.pop_front();
    }
    assert_eq!(sent, 0, "more was taken than was given");
}

fn bytes_are_received_directly_into_segments(mut pair: StreamPair) {
    let bytes: Vec<u8> = (0..100).collect();
    pair.send(&bytes);
    let mut into = vec![pair.segment_at(0, 40), pair.segment_at(1000, 50)];
    for _ in 0..RESTS_MAX {
        if into.is_empty() {
            break;
        }
        match pair.other.receive_into(&into) {
            RecvResult::Bytes(mut came) => {
                while came > 0 {
                    let first = into[0];
                    let taken = first.len_bytes.min(len_u32(came));
                    came -= taken as usize;
                    into[0] = first.slice(taken, first.len_bytes - taken).expect("it is shorter");
                    if into[0].len_bytes == 0 {
                        into.remove(0);
                    }
                }
            }
            RecvResult::WouldBlock => pair.wait_for(NOTHING, BYTES),
            over => panic!("{over:?}"),
        }
    }
    assert_eq!(pair.load_segment(pair.segment_at(0, 40)), bytes[..40]);
    assert_eq!(pair.load_segment(pair.segment_at(1000, 50)), bytes[40..90]);
    pair.receive_until_buffered(10);
    assert_eq!(pair.other.buffered(), &bytes[90..], "what the segments had no room for");
}

/// The bytes behind the segments may be received in the same call, but no more of them than asked for.
fn following_bytes_are_buffered_behind_segments(mut pair: StreamPair) {
    const FOLLOWING: usize = 24;
    let bytes: Vec<u8> = (0..100).collect();
    pair.send(&bytes);
    let (mut into, mut received) = (pair.segment_at(0, 60), 0);
    for _ in 0..RESTS_MAX {
        if into.len_bytes == 0 {
            break;
        }
        match pair.other.receive_into_and_following(&[into], FOLLOWING) {
            RecvResult::Bytes(count) => {
                received += count;
                let direct = into.len_bytes.min(len_u32(count));
                into = into.slice(direct, into.len_bytes - direct).expect("it is shorter");
                assert!(pair.other.buffered().len() >= count - direct as usize);
            }
            RecvResult::WouldBlock => pair.wait_for(NOTHING, BYTES),
            over => panic!("{over:?}"),
        }
    }
    assert_eq!(pair.load_segment(pair.segment_at(0, 60)), bytes[..60]);
    assert!((60..=60 + FOLLOWING).contains(&received), "{received} bytes");
    assert!(pair.other.buffered().starts_with(&bytes[60..received]));
    pair.receive_until_buffered(40);
    assert_eq!(pair.other.buffered(), &bytes[60..]);
}

fn consumed_bytes_are_removed_and_the_rest_stays(mut pair: StreamPair) {
    for round in 0..50_u8 {
        pair.send(&[round; 30]);
        pair.receive_until_buffered(30 + usize::from(round % 7));
        let keep = usize::from((round + 1) % 7);
        let waiting = pair.other.buffered().len();
        assert!(pair.other.buffered().ends_with(&[round; 30]));
        pair.other.consume(waiting - keep);
        assert_eq!(pair.other.buffered(), vec![round; keep]);
        assert_eq!(pair.other.receive(), RecvResult::WouldBlock);
        assert_eq!(pair.other.buffered(), vec![round; keep], "a look in vain changes nothing");
    }
}

fn stream_end_follows_the_sent_data(mut pair: StreamPair) {
    pair.send(b"the last words");
    pair.one.shutdown_write();
    assert!(pair.one.send(b"more", &[SendSlice::Headers { at: 0, len_bytes: 4 }], false).is_err());
    pair.receive_until_buffered(14);
    assert_eq!(pair.receive_until_result(), RecvResult::Eof);
    assert_eq!(pair.other.buffered(), b"the last words");
    assert_eq!(pair.other.receive(), RecvResult::Eof, "and it stays the end");
}

fn one_direction_may_end_before_the_other(mut pair: StreamPair) {
    pair.one.shutdown_write();
    assert_eq!(pair.receive_until_result(), RecvResult::Eof);
    let mut pair = pair.swapped();
    pair.send(b"an answer");
    pair.receive_until_buffered(9);
    assert_eq!(pair.other.buffered(), b"an answer");
    drop(pair.one);
    let over = (0..RESTS_MAX).find_map(|_| match pair.other.receive() {
        RecvResult::WouldBlock => None,
        received => Some(received),
    });
    assert!(matches!(over, Some(RecvResult::Eof | RecvResult::Failed(_)) | None), "{over:?}");
}

fn peer_that_does_not_receive_stops_its_sender(mut pair: StreamPair) {
    let block: Vec<u8> = (0..=250).cycle().take(100_000).collect();
    pair.store_segment(pair.segment_at(0, 100_000), &block);
    let stretch = [SendSlice::Memory(pair.segment_at(0, 100_000))];
    let mut sent = 0_usize;
    let mut in_vain = 0;
    // Bytes in flight may leave space in the buffers for a while.
    while in_vain < 20 {
        let part = slice_from(&stretch, sent % 100_000);
        match pair.one.send(&[], &[part], false).expect("it is connected") {
            0 => {
                in_vain += 1;
                pair.wait_for(NOTHING, NOTHING);
            }
            count => (sent, in_vain) = (sent + count, 0),
        }
        assert!(sent < 1 << 30, "a network without an end");
    }
    assert!(sent > 0);
    let mut came = 0;
    while came < sent {
        pair.receive_until_buffered(1);
        let bytes = pair.other.buffered();
        let expected = block.iter().cycle().skip(came % 100_000).take(bytes.len());
        assert!(bytes.iter().eq(expected), "at {came} of {sent}");
        let count = bytes.len();
        came += count;
        pair.other.consume(count);
    }
    pair.wait_for(ROOM, NOTHING);
    let part = slice_from(&stretch, sent % 100_000);
    let more = (0..RESTS_MAX).find_map(|_| {
        let count = pair.one.send(&[], &[part], false).expect("it is connected");
        (count > 0).then_some(count).or_else(|| {
            pair.wait_for(ROOM, BYTES);
            None
        })
    });
    assert!(more.is_some(), "there is room again");
}

fn slice_from(stretches: &[SendSlice], from: usize) -> SendSlice {
    let mut rest: VecDeque<SendSlice> = stretches.to_vec().into();
    advance_slices(&mut rest, from);
    rest[0]
}

fn closed_peer_is_noticed(mut pair: StreamPair) {
    pair.send(b"x");
    pair.receive_until_buffered(1);
    drop(std::mem::replace(&mut pair.one, Box::new(DroppedStream)));
    let over = pair.receive_until_result();
    assert!(matches!(over, RecvResult::Eof | RecvResult::Failed(_)), "{over:?}");
    let word = [SendSlice::Headers { at: 0, len_bytes: 5 }];
    let broken = (0..RESTS_MAX).find_map(|_| {
        let sent = pair.other.send(b"hello", &word, false);
        let _ = pair.other.receive();
        sent.err()
    });
    assert!(broken.is_some_and(|broken| !broken.0.is_empty()), "the peer is closed");
}

fn released_memory_may_be_reused(mut pair: StreamPair) {
    // Large enough for a zero-copy send, where the engine supports it.
    let len = 256 << 10;
    let segment = pair.segment_at(0, len);
    let mut sent = 0_u64;
    let mut came = Vec::new();
    for round in 1..=8_u8 {
        pair.memory.fill(segment, round).expect("it lies in the memory");
        let mut rest: VecDeque<SendSlice> = [SendSlice::Memory(segment)].into();
        for _ in 0..RESTS_MAX {
            if rest.is_empty() && pair.one.released_bytes() == sent {
                break;
            }
            let taken = pair.one.send(&[], rest.make_contiguous(), false);
            let taken = taken.expect("it is connected");
            sent += taken as u64;
            advance_slices(&mut rest, taken);
            assert!(pair.one.released_bytes() <= sent, "more than was sent");
            let before = pair.other.buffered().len();
            match pair.other.receive() {
                RecvResult::Bytes(_) => {}
                RecvResult::WouldBlock if taken == 0 => pair.wait_for(NOTHING, NOTHING),
                RecvResult::WouldBlock => {}
                over => panic!("{over:?}"),
            }
            came.extend_from_slice(&pair.other.buffered()[before..]);
            let waiting = pair.other.buffered().len();
            pair.other.consume(waiting);
        }
        assert_eq!(pair.one.released_bytes(), sent, "all is released in the end");
    }
    pair.memory.fill(segment, 0xff).expect("it lies in the memory");
    while came.len() < 8 * len as usize {
        pair.receive_until_buffered(1);
        came.extend_from_slice(pair.other.buffered());
        let waiting = pair.other.buffered().len();
        pair.other.consume(waiting);
    }
    for (round, block) in (1_u8..).zip(came.chunks(len as usize)) {
        assert!(block.iter().all(|byte| *byte == round), "round {round} sent something else");
    }
}

fn invalid_segment_is_rejected(mut pair: StreamPair) {
    let stray = Segment { region: RegionId(999), offset: 0, len_bytes: 8 };
    let refused = pair.one.send(&[], &[SendSlice::Memory(stray)], false);
    assert!(refused.is_err_and(|broken| broken.0.contains("999")), "it is named");
    let mut pair = pair.swapped();
    pair.send(b"12345678");
    let refused = (0..RESTS_MAX).find_map(|_| match pair.other.receive_into(&[stray]) {
        RecvResult::WouldBlock => {
            pair.wait_for(NOTHING, BYTES);
            None
        }
        received => Some(received),
    });
    assert!(matches!(refused, Some(RecvResult::Failed(_))), "{refused:?}");
}

fn large_transfers_in_both_directions_are_exact(seed: u64, mut pair: StreamPair) {
    let total = 2_000_000;
    let mut random = Random::new(seed);
    let mut flows = [ByteFlow::default(), ByteFlow::default()];
    let halves = [pair.segment_at(0, 1 << 19), pair.segment_at(1 << 19, 1 << 19)];
    let block: Vec<u8> = (0..1 << 19).map(pattern_byte).collect();
    for half in halves {
        pair.store_segment(half, &block);
    }
    for _ in 0..10 * RESTS_MAX {
        if flows.iter().all(|flow| flow.came == total) {
            return;
        }
        let mut moved = 0;
        for (index, flow) in flows.iter_mut().enumerate() {
            let (from, to) = match index {
                0 => (&mut pair.one, &mut pair.other),
                _ => (&mut pair.other, &mut pair.one),
            };
            moved += flow.send(from.as_mut(), halves[index], total, &mut random);
            moved += flow.receive(to.as_mut(), &mut random);
        }
        if moved == 0 {
            pair.wait_for(NOTHING, NOTHING);
        }
    }
    panic!("{flows:?} of {total} after all these rests (seed {seed})");
}

/// Byte at this offset of the stream, which repeats with its memory.
fn pattern_byte(at: u32) -> u8 {
    let [low, middle, high, _] = (at % (1 << 19)).wrapping_mul(2_654_435_761).to_le_bytes();
    low ^ middle ^ high
}

/// One direction.
#[derive(Debug, Default)]
struct ByteFlow {
    sent: u32,
    came: u32,
}

impl ByteFlow {
    /// Sends a part of the memory, or the same bytes as a header.
    fn send(
        &mut self,
        from: &mut dyn Stream,
        half: Segment,
        total: u32,
        random: &mut Random,
    ) -> u32 {
        let mut headers = Vec::new();
        let mut stretches = Vec::new();
        let mut at = self.sent;
        for _ in 0..random.below(8) {
            let left = (total - at).min((1 << 19) - at % (1 << 19));
            let len_bytes = random_up_to(random, left.min(20_000));
            if random.chance(1, 2) {
                let start = len_u32(headers.len());
                headers.extend((at..at + len_bytes).map(pattern_byte));
                stretches.push(SendSlice::Headers { at: start, len_bytes });
            } else {
                let part = half.slice(at % (1 << 19), len_bytes).expect("it lies inside");
                stretches.push(SendSlice::Memory(part));
            }
            at += len_bytes;
        }
        let has_more = random.chance(1, 4) && at < total;
        let taken = from.send(&headers, &stretches, has_more).expect("it is connected");
        headers.fill(0xee);
        self.sent += len_u32(taken);
        len_u32(taken)
    }

    fn receive(&mut self, to: &mut dyn Stream, random: &mut Random) -> u32 {
        let came = match to.receive() {
            RecvResult::Bytes(came) => came,
            RecvResult::WouldBlock => 0,
            over => panic!("{over:?}"),
        };
        let waiting = to.buffered().len();
        let taken = match random.below(3) {
            0 => waiting,
            _ => random_up_to(random, len_u32(waiting)) as usize,
        };
        let expected = (self.came..).map(pattern_byte);
        assert!(
            to.buffered()[..taken].iter().copied().eq(expected.take(taken)),
            "at {}",
            self.came
        );
        to.consume(taken);
        self.came += len_u32(taken);
        len_u32(came + taken)
    }
}

/// Random number up to `most`.
fn random_up_to(random: &mut Random, most: u32) -> u32 {
    u32::try_from(random.below(u64::from(most) + 1)).unwrap_or(most)
}

/// Placeholder for a dropped end.
struct DroppedStream;

impl Stream for DroppedStream {
    fn receive(&mut self) -> RecvResult {
        RecvResult::Eof
    }

    fn buffered(&self) -> &[u8] {
        &[]
    }

    fn consume(&mut self, _count: usize) {}

    fn receive_into(&mut self, _into: &[Segment]) -> RecvResult {
        RecvResult::Eof
    }

    fn send(
        &mut self,
        _: &[u8],
        _: &[SendSlice],
        _: bool,
    ) -> Result<usize, tenmil_base::StreamError> {
        Ok(0)
    }

    fn released_bytes(&mut self) -> u64 {
        0
    }

    fn shutdown_write(&mut self) {}

    fn wake_source(&self) -> tenmil_base::WakeSource<'_> {
        tenmil_base::WakeSource::None
    }

    fn arm(&mut self, _wants_bytes: bool, _wants_room: bool) -> bool {
        false
    }

    fn peer_description(&self) -> String {
        String::new()
    }
}
