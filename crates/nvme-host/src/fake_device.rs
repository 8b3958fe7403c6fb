//! Simulated device for tests: memory, doorbells, and the controller side of one queue pair.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::{
    CompletionRing, Dma, Doorbell, Instant, InvalidSegment, Memory, RegionId, Segment,
    SubmissionRing,
};
use tenmil_wire::sgl::{DataLocation, Descriptor, DescriptorKind};
use tenmil_wire::{Command, Completion, DataPointer};

use crate::queue_pair::QueueMemory;

/// Time in milliseconds.
pub(crate) const fn instant_at_ms(ms: u64) -> Instant {
    Instant { ns: ms * 1_000_000 }
}

/// Address of every byte of the segments.
pub(crate) fn byte_addresses(segments: &[Segment]) -> Vec<u64> {
    let bytes = |segment: &Segment| {
        let first = (u64::from(segment.region.0) + 1) << 32 | segment.offset;
        first..first + u64::from(segment.len_bytes)
    };
    segments.iter().flat_map(bytes).collect()
}

const PAGE: u64 = 4096;

/// Memory of some pages in region 0. Other regions have addresses, but no contents.
#[derive(Clone, Debug)]
pub(crate) struct FakeDma {
    bytes: Arc<Mutex<Vec<u8>>>,
    next_page: Arc<AtomicU32>,
    pub(crate) is_cut_off: Arc<AtomicBool>,
    /// Every completion entry appears valid in either phase, with invalid contents.
    pub(crate) is_endless: Arc<AtomicBool>,
}

impl FakeDma {
    pub(crate) fn new(pages: usize) -> Self {
        Self {
            bytes: Arc::new(Mutex::new(vec![0; pages * 4096])),
            next_page: Arc::default(),
            is_cut_off: Arc::default(),
            is_endless: Arc::default(),
        }
    }

    /// Bytes that the device finds at `iova`, which must be in region 0.
    pub(crate) fn bytes_at<const N: usize>(&self, iova: u64) -> [u8; N] {
        assert_eq!(iova >> 32, 1, "{iova:#x} is not in region 0");
        let segment = Segment {
            region: RegionId(0),
            offset: iova & 0xffff_ffff,
            len_bytes: u32::try_from(N).unwrap(),
        };
        let mut bytes = [0; N];
        self.load(segment, &mut bytes).unwrap();
        bytes
    }

    /// Evaluates a command's data pointer as a controller does; written from the specification, not from
    /// the code under test. Returns the address of every byte.
    pub(crate) fn data_pointer_addresses(
        &self,
        command: &Command,
        len_bytes: u64,
        page_bytes: u64,
    ) -> Vec<u64> {
        match command.psdt() {
            DataPointer::Prp => self.prp_addresses(command, len_bytes, page_bytes),
            DataPointer::Sgl => self.sgl_addresses(command.sgl1()),
            other => panic!("{other:?} is not used"),
        }
    }

    fn prp_addresses(&self, command: &Command, len_bytes: u64, page_bytes: u64) -> Vec<u64> {
        let (first, second) = (command.prp1(), command.prp2());
        assert_eq!(first % 4, 0, "the first entry begins with a dword");
        let in_first = (page_bytes - first % page_bytes).min(len_bytes);
        let mut found: Vec<u64> = (first..first + in_first).collect();
        let pages = (len_bytes - in_first).div_ceil(page_bytes);
        for page in 0..pages {
            let at = second + 8 * page;
            let in_list = pages > 1;
            assert!(!in_list || second / page_bytes == at / page_bytes, "the list crosses a page");
            let entry = if in_list { u64::from_le_bytes(self.bytes_at(at)) } else { second };
            assert_eq!(entry % page_bytes, 0, "only the first entry has an offset");
            let here = page_bytes.min(len_bytes - found.len() as u64);
            found.extend(entry..entry + here);
        }
        found
    }

    fn sgl_addresses(&self, descriptor: Descriptor) -> Vec<u64> {
        let blocks = match descriptor.decode() {
            DescriptorKind::LastSegment { location: DataLocation::Address(iova), len_bytes } => {
                let count = u64::from(len_bytes) / 16;
                (0..count)
                    .map(|at| Descriptor::from_bytes(&self.bytes_at(iova + 16 * at)))
                    .collect()
            }
            _ => vec![descriptor],
        };
        let bytes = |block: Descriptor| match block.decode() {
            DescriptorKind::DataBlock { location: DataLocation::Address(iova), len_bytes } => {
                iova..iova + u64::from(len_bytes)
            }
            other => panic!("{other:?} among the data blocks"),
        };
        blocks.into_iter().flat_map(bytes).collect()
    }

    fn with_segment_bytes<T>(
        &self,
        segment: Segment,
        work: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T, InvalidSegment> {
        let mut bytes = self.bytes.lock().unwrap();
        let first = usize::try_from(segment.offset).unwrap();
        let end = first.checked_add(segment.len_bytes as usize).ok_or(InvalidSegment(segment))?;
        let bytes = (segment.region == RegionId(0)).then(|| bytes.get_mut(first..end)).flatten();
        bytes.map(work).ok_or(InvalidSegment(segment))
    }
}

impl Memory for FakeDma {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        self.with_segment_bytes(segment, |bytes| into.copy_from_slice(bytes))
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        self.with_segment_bytes(segment, |bytes| bytes.copy_from_slice(from))
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        self.with_segment_bytes(segment, |bytes| bytes.fill(byte))
    }
}

impl Dma for FakeDma {
    type Submission = FakeRing;
    type Completion = FakeRing;

    fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        let pages = u64::from(len_bytes).div_ceil(PAGE);
        let first = self.next_page.fetch_add(u32::try_from(pages).unwrap(), Ordering::Relaxed);
        let segment = Segment { region: RegionId(0), offset: u64::from(first) * PAGE, len_bytes };
        self.fill(segment, 0).ok().map(|()| segment)
    }

    fn release(&self, _: Segment) {}

    /// `(region + 1) << 32`, plus the offset. The device cannot access regions from 100 on.
    fn iova(&self, segment: Segment) -> Option<u64> {
        let region = u64::from(segment.region.0);
        (region < 100).then_some((region + 1) << 32 | segment.offset)
    }

    fn submission_ring(&self, memory: Segment, depth: u32) -> FakeRing {
        FakeRing { dma: self.clone(), memory, depth }
    }

    fn completion_ring(&self, memory: Segment, depth: u32) -> FakeRing {
        FakeRing { dma: self.clone(), memory, depth }
    }

    fn revoke_access(&self) -> bool {
        self.is_cut_off.store(true, Ordering::Relaxed);
        true
    }

    fn restore_access(&self) {
        self.is_cut_off.store(false, Ordering::Relaxed);
    }
}

/// Either side of either ring.
#[derive(Debug)]
pub(crate) struct FakeRing {
    dma: FakeDma,
    memory: Segment,
    depth: u32,
}

impl FakeRing {
    fn entry_segment(&self, index: u32, len_bytes: u32) -> Segment {
        assert!(index < self.depth, "entry {index} of {}", self.depth);
        self.memory.slice(index * len_bytes, len_bytes).expect("the ring lies in its memory")
    }
}

impl SubmissionRing for FakeRing {
    fn store(&mut self, index: u32, command: &[u64; 8]) {
        self.dma.store(self.entry_segment(index, 64), &Command(*command).to_bytes()).unwrap();
    }

    fn order_before_doorbell(&mut self) {}
}

impl CompletionRing for FakeRing {
    fn load(&self, index: u32, phase: bool) -> Option<tenmil_base::CompletionEntry> {
        if self.dma.is_endless.load(Ordering::Relaxed) {
            return Some(tenmil_base::entry_from_dwords([0, 0, 0, 0xffff]));
        }
        let mut bytes = [0; 16];
        self.dma.load(self.entry_segment(index, 16), &mut bytes).unwrap();
        let completion = Completion::from_bytes(&bytes);
        (completion.phase() == phase).then_some(tenmil_base::entry_from_dwords(completion.0))
    }
}

/// Doorbell register: its value, and how often it was written.
#[derive(Clone, Debug, Default)]
pub(crate) struct FakeDoorbell(Arc<[AtomicU32; 2]>);

impl FakeDoorbell {
    pub(crate) fn value(&self) -> u32 {
        self.0[0].load(Ordering::Relaxed)
    }

    pub(crate) fn write_count(&self) -> u32 {
        self.0[1].load(Ordering::Relaxed)
    }

    /// Resets the register.
    fn clear(&self) {
        self.0[0].store(0, Ordering::Relaxed);
    }
}

impl Doorbell for FakeDoorbell {
    fn ring(&mut self, value: u32) {
        self.0[0].store(value, Ordering::Relaxed);
        self.0[1].fetch_add(1, Ordering::Relaxed);
    }
}

/// Controller side of a queue pair. Checks that the host follows the rules.
#[derive(Debug)]
pub(crate) struct FakeQueue {
    dma: FakeDma,
    memory: QueueMemory,
    pub(crate) tail_doorbell: FakeDoorbell,
    pub(crate) head_doorbell: FakeDoorbell,
    submission_head: u32,
    completion_tail: u32,
    phase: bool,
    /// Commands fetched and not completed.
    pub(crate) fetched: VecDeque<Command>,
}

impl FakeQueue {
    pub(crate) fn new(dma: &FakeDma, memory: QueueMemory) -> Self {
        Self {
            dma: dma.clone(),
            memory,
            tail_doorbell: FakeDoorbell::default(),
            head_doorbell: FakeDoorbell::default(),
            submission_head: 0,
            completion_tail: 0,
            phase: true,
            fetched: VecDeque::new(),
        }
    }

    /// Performs a controller reset.
    pub(crate) fn reset(&mut self) {
        self.tail_doorbell.clear();
        self.head_doorbell.clear();
        (self.submission_head, self.completion_tail, self.phase) = (0, 0, true);
        self.fetched.clear();
    }

    /// Fetches the commands up to the doorbell, and returns their number.
    pub(crate) fn fetch(&mut self) -> usize {
        let tail = self.tail_doorbell.value();
        assert!(tail < self.memory.submission_depth, "the doorbell says {tail}");
        let before = self.fetched.len();
        while self.submission_head != tail {
            let entry = self.memory.submission.slice(self.submission_head * 64, 64).unwrap();
            let mut bytes = [0; 64];
            self.dma.load(entry, &mut bytes).unwrap();
            self.fetched.push_back(Command::from_bytes(&bytes));
            self.submission_head = (self.submission_head + 1) % self.memory.submission_depth;
        }
        self.fetched.len() - before
    }

    /// Completes the oldest command.
    pub(crate) fn complete_next(&mut self, status: u16) -> Command {
        let command = self.fetched.pop_front().expect("nothing was fetched");
        self.post(command.cid(), status);
        command
    }

    /// Posts a completion for any `cid`.
    pub(crate) fn post(&mut self, cid: u16, status: u16) {
        let head = self.submission_head;
        self.post_raw_entry([
            u32::from(cid) ^ 0xabcd,
            0,
            head,
            u32::from(status) << 17 | u32::from(cid),
        ]);
    }

    /// Posts an entry of which only the phase is valid.
    pub(crate) fn post_raw_entry(&mut self, mut entry: [u32; 4]) {
        let depth = self.memory.completion_depth;
        let next = (self.completion_tail + 1) % depth;
        assert_ne!(next, self.head_doorbell.value(), "the host has let its completions overrun");
        entry[3] = entry[3] & !(1 << 16) | u32::from(self.phase) << 16;
        let place = self.memory.completion.slice(self.completion_tail * 16, 16).unwrap();
        self.dma.store(place, &Completion(entry).to_bytes()).unwrap();
        if next == 0 {
            self.phase = !self.phase;
        }
        self.completion_tail = next;
    }
}
