//! A block device in memory, bare or under a volume, and a batch of reads for it.

use std::sync::Arc;

use tenmil_base::Error;
use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, Operation, Request, RequestFlags, Segment,
};
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};
use tenmil_dma::{Region, RegionTable};
use tenmil_drivers::RamDevice;
use tenmil_drivers::pool::{self, OpenPool, VolumeOp, VolumeRef};
use tenmil_linux::Clock;

/// A block device, and reads for it.
pub(crate) struct ReadLoad {
    backend: Box<dyn IoChannel>,
    requests: Vec<Request>,
    memory: Region,
    completions: CompletionBatch,
    now: Instant,
}

/// Blocks of 4 KiB in memory, and in the volume.
const BLOCKS: u64 = 8192;
const VOLUME_BLOCKS: u64 = 4096;

impl ReadLoad {
    fn with_requests(regions: &RegionTable, mut backend: Box<dyn IoChannel>, count: u64) -> Self {
        let memory = regions.allocate_region(4096).expect("memory");
        // Far from each other, as random reads are.
        let read = |token: u64| {
            single_block_request(Operation::Read, token, token * 1_237 % VOLUME_BLOCKS)
        };
        (0..VOLUME_BLOCKS).for_each(|lba| write_block(&mut *backend, memory.segment(), lba));
        let room = usize::try_from(count).unwrap_or(0);
        let (requests, completions) =
            ((0..count).map(read).collect(), CompletionBatch::with_capacity(room));
        let mut reads = Self { backend, requests, memory, completions, now: Instant::default() };
        (0..8).for_each(|_| reads.run_iteration());
        reads
    }

    /// Submits all and collects the completions.
    #[inline(never)]
    pub(crate) fn run_iteration(&mut self) {
        self.now.ns += 1_000;
        let segment = Segment { len_bytes: 4096, ..self.memory.segment() };
        let taken = self.backend.submit(self.now, &self.requests, &[segment]);
        self.backend.flush_submissions();
        let completed = self.backend.poll(self.now, &mut self.completions);
        assert_eq!((taken, completed), (self.requests.len(), self.requests.len()));
        self.completions.clear();
    }
}

fn single_block_request(operation: Operation, token: u64, lba: u64) -> Request {
    let (blocks, segment_count, flags) = (1, 1, RequestFlags::NONE);
    Request { token, lba, blocks, segment_count, operation, flags, ..Request::PLACEHOLDER }
}

/// Writes one block.
fn write_block(backend: &mut dyn IoChannel, memory: Segment, lba: u64) {
    let memory = Segment { len_bytes: 4096, ..memory };
    let request = single_block_request(Operation::Write, 0, lba);
    let mut completions = CompletionBatch::with_capacity(1);
    assert_eq!(backend.submit(Instant::default(), &[request], &[memory]), 1);
    backend.flush_submissions();
    while backend.poll(Instant::default(), &mut completions) == 0 {
        tenmil_linux::named_thread::yield_cpu();
    }
    assert!(completions.as_slice()[0].status.is_success());
}

fn ram_device_4k(regions: &RegionTable) -> Arc<dyn BlockDevice> {
    Arc::new(RamDevice::new(regions, 4096, BLOCKS).expect("memory"))
}

/// Memory as it is.
pub(crate) fn ram_device(count: u64) -> ReadLoad {
    let regions = RegionTable::new(64);
    let medium = ram_device_4k(&regions);
    ReadLoad::with_requests(&regions, medium.channel().expect("a channel"), count)
}

/// A thick volume of a store in memory, all of it written.
pub(crate) fn volume_on_ram(count: u64) -> ReadLoad {
    let regions = RegionTable::new(64);
    let medium = ram_device_4k(&regions);
    let kind = |_: &Opener<'_>, _: &Uri| -> Result<OpenedDevice, Error> {
        Ok(OpenedDevice::without_existing_data(Arc::clone(&medium), "the same memory"))
    };
    let clock = Clock::on_kernel_clock();
    let opener = Opener {
        regions: &regions,
        clock,
        seed: 1,
        kinds: &[&[("same", &kind as &dyn tenmil_block::DeviceType)], tenmil_drivers::KINDS]
            .concat(),
    };
    let device: Uri = "same:".parse().expect("a name");
    pool::create_pool(&opener, &device, "bench", false).expect("room for a pool");
    let place = VolumeRef::pool_on(&device);
    let open = OpenPool::open(&opener, &place).expect("a pool");
    let change = VolumeOp::Create {
        name: "v".into(),
        blocks: VOLUME_BLOCKS,
        unit: 16,
        uuid: 1,
        checksums: false,
    };
    open.execute_volume_op(change).expect("a volume");
    open.inflate(&opener, "v", None, &mut |_| true).expect("room for a thick volume");
    let opened = opener.open(&place.uri_of_other_volume("v")).expect("a volume");
    ReadLoad::with_requests(&regions, opened.medium.channel().expect("a channel"), count)
}
