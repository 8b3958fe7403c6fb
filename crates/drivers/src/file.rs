//! File device: blocks in a file or a kernel block device; flushed data is persistent.

#[cfg(test)]
pub(crate) mod failing_sync_file;
mod file_channel;
mod file_io;
mod file_request;
mod lost_write;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{
    BlockDevice, BlockExtent, ErrorCategory, ExtentKind, IoChannel, Limits, Operation,
    OperationSet, Segment,
};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::file_engine::{EngineChoice, EngineLimits, FileEngine};
use tenmil_linux::storage_file::{
    BufferedReason, DirectIoAlignment, FileExtent, FileOptions, StorageFile,
};

use self::file_channel::FileChannel;
pub(crate) use self::file_io::FileIo;
use self::lost_write::LostWriteCounts;
pub use self::lost_write::{LostWrite, subscribe_lost_writes};
use super::bad_blocks::BadBlocks;
use super::request_validation::validate_geometry;
use tenmil_base::Error;
use tenmil_block::ExistingData;
use tenmil_block::uri::Uri;
use tenmil_block::{BLOCK_DEFAULT, OpenedDevice, Opener, whole_block_count};

/// Blocks in a file or a kernel block device. Transfers use direct I/O (`O_DIRECT`) if file, block size
/// and memory allow it. If only the memory does not, they go through a buffer of the channel; otherwise
/// through the page cache.
///
/// A completed write is in a volatile cache until a flush (`fdatasync`), unless it was a FUA write
/// (`RWF_DSYNC`; through the page cache a write and `fdatasync`). Deallocated blocks become holes and read
/// as zeroes if the file system supports holes; the block status is queried from the file system.
/// Uncorrectable marks are kept in memory only and end with the device.
///
/// Once a flush or a forced write has failed, completed writes may be lost: every flush and every forced
/// request of every channel fails with a write fault from then on, until the owner of the channel has
/// acknowledged the loss ([`IoChannel::accept_write_losses`], [`IoChannel::ack_repaired_write_losses`]) or
/// the file is opened anew. [`subscribe_lost_writes`] reports it.
#[derive(Debug)]
pub struct FileDevice {
    shared: Arc<FileShared>,
    choice: EngineChoice,
    engine: String,
    /// Whether its channels use io_uring.
    has_ring: bool,
}

/// Options for opening a file device.
#[derive(Clone, Debug)]
pub struct FileDeviceOptions {
    /// Path of the file.
    pub path: PathBuf,
    /// Size in bytes; the file is created or extended to it. `None` uses the file as it is.
    pub size_bytes: Option<u64>,
    /// Block size in bytes.
    pub block_size: u32,
    /// Whether to use direct I/O where possible.
    pub direct: bool,
    /// Open read-only: the file is neither created nor extended, and other processes may open it to read.
    pub read_only: bool,
    /// I/O engine: io_uring or threads.
    pub engine: EngineChoice,
}

/// State shared by all channels.
#[derive(Debug)]
struct FileShared {
    file: Arc<StorageFile>,
    /// Alignment of direct I/O, or why the page cache is used.
    direct: Result<DirectIoAlignment, BufferedReason>,
    regions: RegionTable,
    /// Limits as of the open.
    limits: Limits,
    /// Current number of blocks.
    block_count: AtomicU64,
    /// Blocks marked uncorrectable, which cannot be read until they are written.
    uncorrectable: BadBlocks,
    /// Whether completed writes never reached stable storage.
    lost_writes: LostWriteCounts,
    /// [`CHUNK_BYTES`] of zeroes, for files that do not support zeroing a range.
    zeroes: Region,
}

/// Device handle and buffer memory of a channel.
#[derive(Debug)]
struct ChannelBuffers {
    shared: Arc<FileShared>,
    memory: Region,
}

/// Bytes in the largest request, and in each buffer of a channel.
const CHUNK_BYTES: u32 = 256 << 10;
/// Buffers of a channel: the maximum number of requests in flight that need one.
const BUFFERS: u16 = 8;
const DEPTH_MAX: u16 = 256;
/// Maximum number of blocks that one block status query covers.
const EXTENT_BLOCKS_MAX: u64 = 1 << 20;
/// 64 pages and one more for an unaligned start.
const SEGMENTS_MAX: u16 = 65;
const CAPACITY: EngineLimits = EngineLimits { depth: DEPTH_MAX, segments_max: SEGMENTS_MAX };

/// Opens `file:PATH?size=1g&block=512&direct=yes&read-only=no&engine=auto`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let engines = [
        ("auto", EngineChoice::Best),
        ("io_uring", EngineChoice::IoUring),
        ("threads", EngineChoice::Threads),
    ];
    if uri.path().is_empty() {
        return Err(uri.error("the file is missing, expected file:/path/to/it").into());
    }
    let mut fields = uri.options();
    let block_size = fields.block_size()?.unwrap_or(BLOCK_DEFAULT);
    let size_bytes = fields.size_value("size")?;
    let direct = fields.choice_value("direct", &[("yes", true), ("no", false)])?.unwrap_or(true);
    let read_only =
        fields.choice_value("read-only", &[("yes", true), ("no", false)])?.unwrap_or(false);
    let engine = fields.choice_value("engine", &engines)?.unwrap_or_default();
    fields.reject_unconsumed()?;
    size_bytes.map(|size| whole_block_count(uri, size, block_size)).transpose()?;
    let path = PathBuf::from(uri.path());
    let options = FileDeviceOptions { path, size_bytes, block_size, direct, read_only, engine };
    let medium = FileDevice::open(opener.regions, &options)?;
    let (description, existing) =
        (medium.description(), medium.existing_data().into_iter().collect());
    Ok(OpenedDevice {
        existing,
        ..OpenedDevice::without_existing_data(Arc::new(medium), description)
    })
}

impl FileDevice {
    /// Opens, creates or extends the file. Requests refer to memory of `regions`, in which the device and
    /// each channel register a region.
    pub fn open(regions: &RegionTable, options: &FileDeviceOptions) -> Result<Self, Error> {
        let FileDeviceOptions { path, size_bytes, block_size, direct, read_only, engine } = options;
        let (block_size, direct, read_only, choice) = (*block_size, *direct, *read_only, *engine);
        validate_geometry("file", block_size, size_bytes.unwrap_or(u64::MAX))?;
        let (path, len_bytes) = (path.clone(), *size_bytes);
        let options = FileOptions { path, len_bytes, unit_bytes: block_size, direct, read_only };
        let file = StorageFile::open(&options)
            .map_err(|error| Error::new(error.category(), format!("file: {error}")))?;
        let file = Arc::new(file);
        let (engine, has_ring) = probe_engine(&file, regions, choice)?;
        let zeroes = allocate_memory(regions, CHUNK_BYTES)
            .map_err(|text| Error::new(ErrorCategory::Environment, format!("file: {text}")))?;
        let mut limits = limits(&file, block_size);
        if read_only {
            limits.operations = READING;
        }
        let shared = FileShared {
            uncorrectable: BadBlocks::default(),
            lost_writes: LostWriteCounts::default(),
            block_count: AtomicU64::new(limits.block_count),
            direct: file.direct_io_alignment(),
            file,
            regions: regions.clone(),
            limits,
            zeroes,
        };
        Ok(Self { shared: Arc::new(shared), choice, engine, has_ring })
    }

    /// Opens the file with a given alignment, for tests.
    #[cfg(test)]
    pub(crate) fn open_with_alignment(
        regions: &RegionTable,
        options: &FileDeviceOptions,
        direct: Result<DirectIoAlignment, BufferedReason>,
    ) -> Result<Self, Error> {
        let mut medium = Self::open(regions, options)?;
        if let Some(shared) = Arc::get_mut(&mut medium.shared) {
            shared.direct = direct;
        }
        Ok(medium)
    }

    /// Creates a channel over a given engine.
    pub(crate) fn open_channel_with_engine<J: FileIo + 'static>(
        &self,
        jobs: J,
    ) -> Result<Box<dyn IoChannel>, Error> {
        Ok(Box::new(FileChannel::new(jobs, ChannelBuffers::allocate(&self.shared)?)))
    }

    /// Data that a write would destroy: the contents of the file before it was opened, unless read-only.
    pub fn existing_data(&self) -> Option<ExistingData> {
        let FileShared { file, limits, .. } = &*self.shared;
        let found = format!("{} bytes", file.len_bytes_before_open());
        let name = file.path().display().to_string();
        let can_be_lost = file.len_bytes_before_open() > 0 && limits.operations != READING;
        can_be_lost.then_some(ExistingData { name, found, path: Some(file.path().into()) })
    }

    /// One line: the file, the engine, and direct I/O or the reason against it.
    pub fn description(&self) -> String {
        let file = &self.shared.file;
        let way = match file.direct_io_alignment() {
            Ok(alignment) => format!("direct, aligned to {} bytes", alignment.offset_bytes),
            Err(why) => why.to_string(),
        };
        format!("file {} by {}, {way}", file.path().display(), self.engine)
    }
}

impl BlockDevice for FileDevice {
    fn limits(&self) -> Limits {
        self.shared.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let FileShared { file, regions, .. } = &*self.shared;
        let engine = FileEngine::new(Arc::clone(file), regions, CAPACITY, self.choice);
        self.open_channel_with_engine(engine.map_err(Error::environment)?)
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        let FileShared { file, limits, uncorrectable, .. } = &*self.shared;
        let left = self.shared.block_count().saturating_sub(lba);
        if left == 0 {
            return Ok(BlockExtent { blocks: 0, kind: ExtentKind::Data });
        }
        let block_size = u64::from(limits.block_size);
        let found = to_whole_blocks(file.extent_at(lba * block_size), block_size);
        let blocks = found.blocks.min(left).min(EXTENT_BLOCKS_MAX);
        let (is_lost, run) = uncorrectable.state_run_at(lba, blocks);
        // An uncorrectable block does not read as zeroes.
        let holds = if is_lost { ExtentKind::Data } else { found.kind };
        Ok(BlockExtent { blocks: run, kind: holds })
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        let FileShared { file, limits, .. } = &*self.shared;
        let len_bytes = file.refresh_len().map_err(Error::environment)?;
        let found = len_bytes / u64::from(limits.block_size);
        self.shared.block_count.fetch_max(found, Ordering::Relaxed);
        Ok(found)
    }

    fn supports_kernel_buffers(&self) -> Result<u32, Error> {
        if !self.has_ring {
            return Err(Error::environment(format!(
                "its engine is {}, expected io_uring",
                self.engine
            )));
        }
        Ok(self.shared.direct.map_or(1, |alignment| alignment.memory_bytes))
    }

    fn is_resizable(&self) -> bool {
        self.shared.limits.operations != READING
    }

    fn resize(&self, block_count: u64) -> Result<(), Error> {
        let FileShared { file, limits, uncorrectable, .. } = &*self.shared;
        let refuse = |found: &str, expected: &str| {
            Err(format!("resize {}: {found}, expected {expected}", file.path().display()))
        };
        if !self.is_resizable() {
            return refuse("it was opened to be read", "one that was opened to be written")
                .map_err(Error::environment);
        }
        let len_bytes = block_count.checked_mul(u64::from(limits.block_size));
        let Some(len_bytes) = len_bytes.filter(|bytes| *bytes > 0) else {
            return refuse(
                &format!("{block_count} blocks"),
                "at least 1, and fewer than 2^64 bytes",
            )
            .map_err(Error::environment);
        };
        let before = self.shared.block_count();
        if block_count < before {
            // Before the resize, so that no request past the new end is accepted.
            self.shared.block_count.store(block_count, Ordering::Relaxed);
        }
        if let Err(error) = file.resize(len_bytes) {
            self.shared.block_count.store(before, Ordering::Relaxed);
            return Err(Error::environment(error));
        }
        uncorrectable.clear(block_count, u64::MAX);
        self.shared.block_count.store(block_count, Ordering::Relaxed);
        Ok(())
    }
}

impl FileShared {
    fn limits(&self) -> Limits {
        Limits { block_count: self.block_count(), ..self.limits.clone() }
    }

    /// Relaxed: the value orders no other data.
    #[inline]
    fn block_count(&self) -> u64 {
        self.block_count.load(Ordering::Relaxed)
    }
}

impl ChannelBuffers {
    fn allocate(shared: &Arc<FileShared>) -> Result<Self, Error> {
        let memory = allocate_memory(&shared.regions, CHUNK_BYTES * u32::from(BUFFERS))?;
        Ok(Self { shared: Arc::clone(shared), memory })
    }

    fn buffer(&self, index: u16) -> Segment {
        let offset = u64::from(index) * u64::from(CHUNK_BYTES);
        Segment { region: self.memory.id(), offset, len_bytes: CHUNK_BYTES }
    }
}

/// Determines the engine of the channels at open time, so that a missing one is reported early. Returns
/// its name and whether it is io_uring.
fn probe_engine(
    file: &Arc<StorageFile>,
    regions: &RegionTable,
    choice: EngineChoice,
) -> Result<(String, bool), Error> {
    let capacity = EngineLimits { depth: 1, segments_max: 1 };
    let engine = FileEngine::new(Arc::clone(file), regions, capacity, choice)
        .map_err(|error| Error::new(error.category(), format!("file: {error}")))?;
    let name = match engine.io_uring_error() {
        Some(errno) => format!("{} (io_uring is refused: {errno})", engine.name()),
        None => engine.name().into(),
    };
    Ok((name, engine.supports_kernel_buffers()))
}

/// Operations on a read-only file.
const READING: OperationSet = OperationSet::from_operations(&[
    Operation::Read,
    Operation::Compare,
    Operation::Verify,
    Operation::Flush,
]);

/// Converts an extent to whole blocks: a hole covers the blocks inside it, data the blocks it overlaps. A
/// block that is a hole only in part is data.
fn to_whole_blocks(found: FileExtent, block_size: u64) -> BlockExtent {
    let whole = found.len_bytes / block_size;
    if found.is_hole && whole > 0 {
        return BlockExtent { blocks: whole, kind: ExtentKind::Hole };
    }
    BlockExtent { blocks: found.len_bytes.div_ceil(block_size), kind: ExtentKind::Data }
}

fn limits(file: &StorageFile, block_size: u32) -> Limits {
    Limits {
        block_size,
        metadata_size: 0,
        block_count: file.len_bytes() / u64::from(block_size),
        request_blocks_max: CHUNK_BYTES / block_size,
        segments_max: SEGMENTS_MAX,
        optimal_boundary_blocks: 0,
        atomic_write_blocks: 1,
        depth_max: u32::from(DEPTH_MAX),
        durability: file.durability(),
        operations: OperationSet::from_operations(&Operation::ALL)
            .without(OperationSet::from_operations(&[Operation::CompareAndWrite])),
    }
}

fn allocate_memory(regions: &RegionTable, len_bytes: u32) -> Result<Region, Error> {
    regions.allocate_region(len_bytes as usize).map_err(Error::environment)
}
