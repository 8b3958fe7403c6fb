//! The devices under test, and a driver for them.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Durability, Instant, IoChannel, IoCompletion, IoStatus, Limits,
    Memory, Operation, Random, Request, RequestFlags, Segment, Span, WakeSource,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::{Clock, Sleeper};

use super::partial_accept_device::PartialAcceptDeviceType;
use super::zeroed_crypt_device::ZeroedCryptType;
use crate::mirror::tests::CreatedMirrorType;
use crate::pool::tests::PoolVolumeType;
use crate::tests::adapt::strict_device::StrictDeviceKind;
use crate::tests::scheduled_device::ScheduledDeviceType;
use tenmil_block::{Bdev, BdevOptions, ChannelMode, Claim, Opener, PER_CHANNEL, QueueMap};

/// One device under test.
pub(super) struct TestedDevice {
    pub(super) name: String,
    pub(super) medium: Arc<dyn BlockDevice>,
    /// Whether it moves data.
    pub(super) moves: bool,
    /// Whether flushed data survives a power failure.
    pub(super) stays: bool,
    /// Whether the contents of deallocated blocks are unknown.
    pub(super) is_ciphered: bool,
    /// Whether it has background work.
    pub(super) is_busy: bool,
    regions: RegionTable,
    memory: Segment,
    _directory: tempfile::TempDir,
}

/// A channel of a device, and a clock that advances on demand.
pub(super) struct SynchronousChannel {
    pub(super) name: String,
    pub(super) channel: Box<dyn IoChannel>,
    pub(super) now: Instant,
    regions: RegionTable,
    memory: Segment,
}

/// Every device, in every way it can be opened on this machine.
pub(super) fn all_devices() -> Vec<TestedDevice> {
    let mut media = vec![tested_device("null:?size=8m&block=4k")];
    media.push(tested_device("model:[null:?size=8m&block=4k]?device=p4800x"));
    media.push(tested_device("null:?size=8m&block=4k").under_bdev_layer(&LAYERS[0]));
    media.push(tested_device("null:?size=8m&block=4k").under_bdev_layer(&LAYERS[1]));
    media.extend(readable_tested_devices());
    media
}

/// Every device whose written data can be read.
pub(super) fn readable_tested_devices() -> Vec<TestedDevice> {
    let names = [
        "ram:8m?block=4k",
        "ram:4m",
        "model:p4600?size=8m&block=4k&seed=3",
        "file:DISK?size=8m&block=4k&engine=threads",
        "file:DISK?size=8m&direct=no&engine=threads",
        "file:DISK?size=8m&block=4k&engine=auto",
        "file:DISK?size=4m&engine=auto",
        "file:DISK?size=8m&block=4k&engine=auto&direct=no",
        "delay:[ram:8m?block=4k]?read=80us&read-p99=1ms&write=20us&seed=5",
        "delay:[file:DISK?size=8m&block=4k]?write=30us",
        "fault:[ram:8m?block=4k]",
        "fault:[file:DISK?size=8m&block=4k]?rule=error:read@2000-2001",
        "split:[ram:20m?block=4k]?part=1&parts=2",
        "split:[file:DISK?size=12m&block=4k]?offset=4m&size=8m",
        "stripe:[ram:4m?block=4k]?chunk=4k",
        "stripe:[ram:4m?block=4k],[ram:6m?block=4k]?chunk=16k",
        "stripe:[ram:3m],[delay:[ram:2m]?read=10us],[split:[ram:4m]?part=1&parts=2]?chunk=4k",
        "stripe:[file:DISK?size=4m&block=4k],[file:DISK2?size=4m&block=4k]",
        "stripe:[ram:2m],[file:DISK?size=2m&engine=threads&direct=no]?chunk=1k",
        "harsh:[ram:8m?block=4k]",
        "harsh:[ram:4m]?align=512&force=no",
        "harsh:[delay:[ram:8m?block=4k]?read=10us&write=20us]?align=4096",
        "harsh:[file:DISK?size=8m&block=4k]?force=no",
        "merge:[ram:8m?block=4k]",
        "deadline:[delay:[ram:8m?block=4k]?read=10us&write=20us]",
        "stream-batch:[ram:4m]",
        "stream-batch:[delay:[ram:8m?block=4k]?read=10us]",
        "merge:[harsh:[ram:4m]]",
        "merge:[stream-batch:[deadline:[file:DISK?size=4m&block=4k]]]",
        "made:[ram:9m?block=4k],[ram:9m?block=4k]",
        "made:[ram:5m],[file:DISK?size=5m&engine=threads],[ram:6m]",
        "made:[file:DISK?size=9m&block=4k],[file:DISK2?size=9m&block=4k]",
        "made:[delay:[ram:5m]?read=10us],[fault:[ram:5m]?rule=error:any+9~9]",
        "crypt:[ram:8m?block=4k]",
        "crypt:[file:DISK?size=4m]",
        "crypt:[made:[ram:9m?block=4k],[ram:9m?block=4k]]",
        "made:[crypt:[ram:5m]],[ram:5m]",
        "stripe:[made:[ram:3m],[ram:3m]],[made:[ram:3m],[ram:3m]]?chunk=4k",
        "split:[made:[ram:9m],[ram:9m]]?part=1&parts=2",
        "harsh:[crypt:[ram:8m?block=4k]]",
        "stored:[ram:17m?block=4k]",
        "stored:[ram:9m]",
        "stored:[file:DISK?size=17m&block=4k]",
        "stored:[file:DISK?size=9m&engine=threads]",
        "stored:[delay:[ram:9m]?read=10us&write=20us]",
        "stored:[made:[ram:9m],[ram:9m]]",
        "stored:[stored:[ram:20m]]",
        "stored:[ram:9m?block=4k],[ram:9m]",
        "stored:[delay:[ram:4m]?write=20us],[file:DISK?size=4m&engine=threads],[ram:5m?block=4k]",
    ];
    let mut media: Vec<TestedDevice> = names.map(tested_device).into();
    media.extend(LAYERS.iter().map(|layer| tested_device(layer.over).under_bdev_layer(layer)));
    // A file system in memory has holes, and cannot zero a range in place.
    match tempfile::tempdir_in("/dev/shm") {
        Ok(directory) => media.push(tested_device_in(directory, "file:DISK?size=8m&block=4k")),
        Err(error) => println!("skipped: a file in /dev/shm ({error})"),
    }
    media
}

/// The multi-queue layer over a device.
pub(super) struct BdevLayerConfig {
    over: &'static str,
    mode: ChannelMode,
    map: QueueMap,
    channels_max: u32,
    scheduler: &'static str,
}

const fn bdev_layer_config(
    over: &'static str,
    mode: ChannelMode,
    map: QueueMap,
    channels_max: u32,
) -> BdevLayerConfig {
    BdevLayerConfig { over, mode, map, channels_max, scheduler: "none" }
}

/// The layer in every mode, with owned and with shared contexts.
const LAYERS: [BdevLayerConfig; 7] = [
    bdev_layer_config(
        "ram:8m?block=4k",
        ChannelMode::Mq,
        QueueMap::with_default_contexts(PER_CHANNEL),
        u32::MAX,
    ),
    bdev_layer_config("ram:8m?block=4k", ChannelMode::Mq, QueueMap::with_default_contexts(1), 3),
    bdev_layer_config(
        "ram:8m?block=4k",
        ChannelMode::Mq,
        QueueMap { default: 1, read: 2, poll: 0 },
        2,
    ),
    bdev_layer_config("ram:4m", ChannelMode::SingleQueue, QueueMap::with_default_contexts(1), 3),
    bdev_layer_config("ram:4m", ChannelMode::Bypass, QueueMap::with_default_contexts(1), 3),
    BdevLayerConfig {
        scheduler: "deadline?depth=8",
        ..bdev_layer_config(
            "file:DISK?size=8m&block=4k",
            ChannelMode::Mq,
            QueueMap::with_default_contexts(1),
            3,
        )
    },
    bdev_layer_config(
        "file:DISK?size=8m&block=4k",
        ChannelMode::Mq,
        QueueMap::with_default_contexts(PER_CHANNEL),
        3,
    ),
];

fn tested_device(name: &str) -> TestedDevice {
    tested_device_in(tempfile::tempdir().unwrap(), name)
}

fn tested_device_in(directory: tempfile::TempDir, name: &str) -> TestedDevice {
    let path = directory.path().join("blocks");
    let uri = name.replace("DISK2", "DISK.2").replace("DISK", &path.display().to_string());
    let regions = RegionTable::new(64);
    let memory =
        regions.add_mapping(MemoryMapping::new(2 << 20, MemoryBacking::Private).unwrap()).unwrap();
    let crypt = ZeroedCryptType::new();
    let opener = Opener {
        regions: &regions,
        clock: Clock::start(),
        seed: 3,
        kinds: &crate::tests::device_types_with(&[
            ("reluctant", &PartialAcceptDeviceType),
            ("made", &CreatedMirrorType),
            ("stored", &PoolVolumeType::ORDERLY),
            ("crypt", &crypt),
            ("harsh", &StrictDeviceKind),
            ("merge", &ScheduledDeviceType),
            ("deadline", &ScheduledDeviceType),
            ("stream-batch", &ScheduledDeviceType),
        ]),
    };
    let opened = opener.open(&uri.parse().unwrap()).unwrap();
    let in_memory =
        tenmil_linux::storage_file::StorageFile::open(&tenmil_linux::storage_file::FileOptions {
            path: directory.path().join("probe"),
            len_bytes: Some(512),
            unit_bytes: 512,
            direct: false,
            read_only: false,
        })
        .unwrap()
        .durability()
            == Durability::NonPersistent;
    TestedDevice {
        name: format!("{name} ({})", opened.description),
        medium: opened.medium,
        moves: !name.contains("null"),
        is_ciphered: name.contains("crypt"),
        is_busy: name.contains("made"),
        stays: name.contains("file") && !name.contains("ram") && !in_memory,
        regions,
        memory,
        _directory: directory,
    }
}

impl TestedDevice {
    /// The same device under a layer.
    fn under_bdev_layer(self, layer: &BdevLayerConfig) -> Self {
        let BdevLayerConfig { mode, map, channels_max, .. } = *layer;
        let options = BdevOptions::new(Clock::start(), 1);
        let scheduler = layer.scheduler.parse().unwrap();
        let options = BdevOptions { mode, map, channels_max, scheduler, ..options };
        let device = Bdev::new("disk", self.medium, options).unwrap();
        let medium = Arc::new(device.open(Claim::Exclusive, "conformance").unwrap());
        let name = format!("{mode:?} {map:?} over {}", self.name);
        Self { name, medium, ..self }
    }

    pub(super) fn synchronous_channel(&self) -> SynchronousChannel {
        SynchronousChannel {
            name: self.name.clone(),
            channel: self.medium.channel().unwrap(),
            now: Instant::default(),
            regions: self.regions.clone(),
            memory: self.memory,
        }
    }
}

impl SynchronousChannel {
    pub(super) fn limits(&self) -> Limits {
        self.channel.limits().clone()
    }

    pub(super) fn block_size(&self) -> usize {
        self.limits().block_size as usize
    }

    /// Whether the device supports `operation`.
    pub(super) fn supports(&self, operation: Operation) -> bool {
        self.channel.limits().operations.has(operation)
    }

    /// Page-aligned memory for `blocks` blocks.
    pub(super) fn memory(&self, blocks: u32) -> Segment {
        self.memory.slice(0, blocks * self.limits().block_size).unwrap()
    }

    /// Memory for `bytes`, cut at random into up to eight segments with gaps between them.
    pub(super) fn store_in_random_segments(
        &self,
        bytes: &[u8],
        random: &mut Random,
    ) -> Vec<Segment> {
        let mut left = u32::try_from(bytes.len()).unwrap();
        let mut at = u32::try_from(random.below(64)).unwrap() * 4;
        let mut segments = Vec::new();
        while left > 0 {
            let most = if segments.len() == 7 { left } else { left.min(7_000) };
            let len =
                if most == left { left } else { u32::try_from(random.below(7_000)).unwrap() + 1 };
            let len = len.min(left);
            segments.push(self.memory.slice(at, len).unwrap());
            at += len + u32::try_from(random.below(3)).unwrap() * 2;
            left -= len;
        }
        segments
    }

    pub(super) fn write_segments(&self, segments: &[Segment], bytes: &[u8]) {
        let mut rest = bytes;
        for segment in segments {
            let (part, more) = rest.split_at(segment.len_bytes as usize);
            self.regions.store(*segment, part).unwrap();
            rest = more;
        }
    }

    pub(super) fn read_segments(&self, segments: &[Segment]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for segment in segments {
            let from = bytes.len();
            bytes.resize(from + segment.len_bytes as usize, 0);
            self.regions.load(*segment, &mut bytes[from..]).unwrap();
        }
        bytes
    }

    pub(super) fn request(&self, operation: Operation, lba: u64, blocks: u32) -> Request {
        let (segment_first, segment_count, metadata_count) = (0, 0, 0);
        let (token, operand, flags) = (0x1234_5678_9abc_def0, 0, RequestFlags::NONE);
        Request {
            token,
            lba,
            operand,
            blocks,
            segment_first,
            segment_count,
            metadata_count,
            operation,
            flags,
        }
    }

    /// Advances the time by a microsecond, or as far as the channel needs, and polls once.
    pub(super) fn poll_once(&mut self, room: usize) -> Vec<IoCompletion> {
        self.now = Instant { ns: self.now.ns + 1_000 };
        let wake_at = self.channel.wake_at();
        if wake_at != Instant::NEVER {
            self.now = self.now.max(wake_at);
        }
        let mut completions = CompletionBatch::with_capacity(room);
        self.channel.flush_submissions();
        let count = self.channel.poll(self.now, &mut completions);
        assert_eq!(count, completions.as_slice().len());
        completions.drain().collect()
    }

    /// Sleeps until the channel wakes its thread, unless it must not sleep.
    pub(super) fn sleep(&mut self, sleeper: &mut Sleeper) {
        if self.channel.arm() {
            self.now = Instant { ns: self.now.ns + 1_000 };
            return;
        }
        let wake_at = self.channel.wake_at();
        match self.channel.wake_source() {
            _ if wake_at != Instant::NEVER => self.now = self.now.max(wake_at),
            WakeSource::Descriptor(_) => {
                let mut ready = Vec::new();
                // A signal to the process may end a sleep; no sleep may last this long.
                for _ in 0..10 {
                    sleeper.sleep_until_ready(Span::from_secs(1), &mut ready);
                    if !ready.is_empty() || self.channel.arm() {
                        break;
                    }
                }
                assert!(!ready.is_empty() || self.channel.arm(), "{} overslept", self.name);
            }
            source => panic!("{} would sleep for ever on {source:?}", self.name),
        }
        self.channel.disarm();
    }

    /// Executes one request alone.
    pub(super) fn submit(&mut self, request: Request, segments: &[Segment]) -> IoStatus {
        assert_eq!(self.channel.submit(self.now, &[request], segments), 1, "{}", self.name);
        loop {
            if let [completion] = self.poll_once(4)[..] {
                assert_eq!(completion.token, request.token);
                return completion.status;
            }
        }
    }

    pub(super) fn run_with_segments(
        &mut self,
        operation: Operation,
        lba: u64,
        blocks: u32,
        segments: &[Segment],
    ) -> IoStatus {
        let mut request = self.request(operation, lba, blocks);
        request.segment_count = u16::try_from(segments.len()).unwrap();
        self.submit(request, segments)
    }

    pub(super) fn run_request(
        &mut self,
        operation: Operation,
        lba: u64,
        blocks: u32,
        flags: RequestFlags,
    ) -> IoStatus {
        let request = Request { flags, ..self.request(operation, lba, blocks) };
        self.submit(request, &[])
    }

    pub(super) fn run_expecting_success(
        &mut self,
        operation: Operation,
        lba: u64,
        blocks: u32,
        flags: RequestFlags,
    ) {
        let status = self.run_request(operation, lba, blocks, flags);
        assert_eq!(status, IoStatus::SUCCESS, "{}: {operation:?} {lba} {blocks}", self.name);
    }

    pub(super) fn copy(&mut self, source: u64, target: u64, blocks: u32) -> IoStatus {
        let request = self.request(Operation::Copy, target, blocks);
        self.submit(Request { operand: source, ..request }, &[])
    }

    pub(super) fn write(
        &mut self,
        lba: u64,
        blocks: u32,
        byte: u8,
        flags: RequestFlags,
    ) -> IoStatus {
        let memory = self.memory(blocks);
        self.regions.fill(memory, byte).unwrap();
        let request = self.request(Operation::Write, lba, blocks);
        self.submit(Request { flags, segment_count: 1, ..request }, &[memory])
    }

    pub(super) fn read(
        &mut self,
        lba: u64,
        blocks: u32,
        flags: RequestFlags,
    ) -> (IoStatus, Vec<u8>) {
        let memory = self.memory(blocks);
        self.regions.fill(memory, 0xee).unwrap();
        let request = self.request(Operation::Read, lba, blocks);
        let status = self.submit(Request { flags, segment_count: 1, ..request }, &[memory]);
        (status, self.read_segments(&[memory]))
    }
}
