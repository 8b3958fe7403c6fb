//! The medium that is a file or a block device: what was flushed is there the next time.

mod channel;
#[cfg(test)]
pub(crate) mod failing;
mod jobs;
mod lost_write;
#[cfg(test)]
mod tests;
mod work;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::{Backend, Blame, Extent, Holds, Limits, Medium, Operation, Segment, Support};
use dma::{Region, Regions};
use host::engine::{Capacity, Choice, Engine};
use host::file::{Alignment, File, FileExtent, FileOptions, Indirect};

use self::channel::FileChannel;
pub(crate) use self::jobs::Jobs;
use self::lost_write::LostWrites;
pub use self::lost_write::{LostWrite, hear_of_lost_writes};
use super::lost::Lost;
use super::range::check_geometry;
use crate::open::{BLOCK_DEFAULT, Opened, Opener, block_count};
use crate::uri::Uri;
use crate::{Existing, MediumError};

/// Blocks in a file. Transfers go directly between the disk and the memory of the request where
/// file, block size and memory allow it; where only the memory does not, through a buffer of the
/// channel's own; else through the page cache.
///
/// A write that was answered lies in a volatile cache until a flush (`fdatasync`) or unless it was
/// forced (`RWF_DSYNC`). Deallocated blocks become holes and read as zeroes, where the file system
/// has holes; which ones are is asked of the file system. Marks of uncorrectable blocks are kept in
/// memory only and end with the medium.
///
/// Once a flush or a forced write has failed, answered writes may be lost: every flush and every forced
/// request of every channel fails with a write fault from then on, until the owner of the channel has
/// acknowledged the loss ([`Backend::acknowledge_losses`], [`Backend::heed_losses`]) or the file is opened
/// anew. [`hear_of_lost_writes`] reports it.
#[derive(Debug)]
pub struct FileMedium {
    shared: Arc<Shared>,
    choice: Choice,
    engine: String,
    /// Whether its channels have rings.
    has_ring: bool,
}

/// How to open a file as a medium.
#[derive(Clone, Debug)]
pub struct FileMediumOptions {
    /// Where it lies.
    pub path: PathBuf,
    /// Bytes to use; the file is made, or grows, to that. `None` takes the file as it is.
    pub size_bytes: Option<u64>,
    /// Bytes in a block.
    pub block_size: u32,
    /// Whether to go round the page cache where that can be done.
    pub direct: bool,
    /// Whether it is only to be read: it is neither made nor grown, and others may read it too.
    pub read_only: bool,
    /// How to talk to the kernel.
    pub engine: Choice,
}

/// What all channels use.
#[derive(Debug)]
struct Shared {
    file: Arc<File>,
    /// What a transfer must be aligned to, or why it goes through the page cache.
    direct: Result<Alignment, Indirect>,
    regions: Regions,
    /// As they were when it was opened.
    limits: Limits,
    /// How many blocks there are now.
    block_count: AtomicU64,
    /// Blocks that cannot be read until they are written.
    uncorrectable: Lost,
    /// Answered writes that are not on the medium and never will be.
    lost_writes: LostWrites,
    /// [`CHUNK_BYTES`] of zeroes, for files that cannot be told to hold some.
    zeroes: Region,
}

/// What a channel has of its medium, and the memory of its buffers.
#[derive(Debug)]
struct Loan {
    shared: Arc<Shared>,
    memory: Region,
}

/// Bytes in the largest request, and in each of a channel's own buffers.
const CHUNK_BYTES: u32 = 256 << 10;
/// A channel's own buffers: so many requests that need one are under way at once.
const BUFFERS: u16 = 8;
const DEPTH_MAX: u16 = 256;
/// Blocks whose marks one question about extents looks at.
const EXTENT_BLOCKS_MAX: u64 = 1 << 20;
/// 64 pages and the one that an unaligned start adds.
const SEGMENTS_MAX: u16 = 65;
const CAPACITY: Capacity = Capacity { depth: DEPTH_MAX, segments_max: SEGMENTS_MAX };

/// Opens `file:PATH?size=1g&block=512&direct=yes&read-only=no&engine=auto`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
    let engines =
        [("auto", Choice::Best), ("io_uring", Choice::Ring), ("threads", Choice::Threads)];
    if uri.path().is_empty() {
        return Err(uri.refuse("the file is missing, expected file:/path/to/it").into());
    }
    let mut fields = uri.fields();
    let block_size = fields.block_size()?.unwrap_or(BLOCK_DEFAULT);
    let size_bytes = fields.size("size")?;
    let direct = fields.choice("direct", &[("yes", true), ("no", false)])?.unwrap_or(true);
    let read_only = fields.choice("read-only", &[("yes", true), ("no", false)])?.unwrap_or(false);
    let engine = fields.choice("engine", &engines)?.unwrap_or_default();
    fields.finish()?;
    size_bytes.map(|size| block_count(uri, size, block_size)).transpose()?;
    let path = PathBuf::from(uri.path());
    let options = FileMediumOptions { path, size_bytes, block_size, direct, read_only, engine };
    let medium = FileMedium::open(opener.regions, &options)?;
    let (description, existing) = (medium.describe(), medium.existing().into_iter().collect());
    Ok(Opened { existing, ..Opened::fresh(Arc::new(medium), description) })
}

impl FileMedium {
    /// Opens, makes or grows the file. Requests name memory of `regions`, in which the medium and
    /// each channel take a place of their own.
    pub fn open(regions: &Regions, options: &FileMediumOptions) -> Result<Self, MediumError> {
        let FileMediumOptions { path, size_bytes, block_size, direct, read_only, engine } = options;
        let (block_size, direct, read_only, choice) = (*block_size, *direct, *read_only, *engine);
        check_geometry("file", block_size, size_bytes.unwrap_or(u64::MAX))?;
        let (path, len_bytes) = (path.clone(), *size_bytes);
        let options = FileOptions { path, len_bytes, unit_bytes: block_size, direct, read_only };
        let file = File::open(&options)
            .map_err(|error| MediumError::new(error.blame(), format!("file: {error}")))?;
        let file = Arc::new(file);
        let (engine, has_ring) = try_engine(&file, regions, choice)?;
        let zeroes = memory(regions, CHUNK_BYTES)
            .map_err(|text| MediumError::new(Blame::Machine, format!("file: {text}")))?;
        let mut limits = limits(&file, block_size);
        if read_only {
            limits.support = READING;
        }
        let shared = Shared {
            uncorrectable: Lost::default(),
            lost_writes: LostWrites::default(),
            block_count: AtomicU64::new(limits.block_count),
            direct: file.direct(),
            file,
            regions: regions.clone(),
            limits,
            zeroes,
        };
        Ok(Self { shared: Arc::new(shared), choice, engine, has_ring })
    }

    /// The same for tests, which say what transfers have to be aligned to.
    #[cfg(test)]
    pub(crate) fn open_as(
        regions: &Regions,
        options: &FileMediumOptions,
        direct: Result<Alignment, Indirect>,
    ) -> Result<Self, MediumError> {
        let mut medium = Self::open(regions, options)?;
        if let Some(shared) = Arc::get_mut(&mut medium.shared) {
            shared.direct = direct;
        }
        Ok(medium)
    }

    /// A channel whose jobs are carried out by `jobs`.
    pub(crate) fn channel_over<J: Jobs + 'static>(
        &self,
        jobs: J,
    ) -> Result<Box<dyn Backend>, String> {
        Ok(Box::new(FileChannel::new(jobs, Loan::take(&self.shared)?)))
    }

    /// What a write would destroy: whatever was in the file before it was opened.
    pub fn existing(&self) -> Option<Existing> {
        let Shared { file, limits, .. } = &*self.shared;
        let found = format!("{} bytes", file.found_bytes());
        let name = file.path().display().to_string();
        let can_be_lost = file.found_bytes() > 0 && limits.support != READING;
        can_be_lost.then_some(Existing { name, found, path: Some(file.path().into()) })
    }

    /// One line: which file, by which engine, and whether the page cache is in the way and why.
    pub fn describe(&self) -> String {
        let file = &self.shared.file;
        let way = match file.direct() {
            Ok(alignment) => format!("direct, aligned to {} bytes", alignment.offset_bytes),
            Err(why) => why.to_string(),
        };
        format!("file {} by {}, {way}", file.path().display(), self.engine)
    }
}

impl Medium for FileMedium {
    fn limits(&self) -> Limits {
        self.shared.limits()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let Shared { file, regions, .. } = &*self.shared;
        let engine = Engine::new(Arc::clone(file), regions, CAPACITY, self.choice);
        self.channel_over(engine.map_err(|error| error.to_string())?)
    }

    fn extent(&self, lba: u64) -> Result<Extent, String> {
        let Shared { file, limits, uncorrectable, .. } = &*self.shared;
        let left = self.shared.block_count().saturating_sub(lba);
        if left == 0 {
            return Ok(Extent { blocks: 0, holds: Holds::Data });
        }
        let block_size = u64::from(limits.block_size);
        let found = in_blocks(file.extent(lba * block_size), block_size);
        let blocks = found.blocks.min(left).min(EXTENT_BLOCKS_MAX);
        let (is_lost, run) = uncorrectable.run(lba, blocks);
        // What cannot be read does not read as zeroes.
        let holds = if is_lost { Holds::Data } else { found.holds };
        Ok(Extent { blocks: run, holds })
    }

    fn notice_size(&self) -> Result<u64, String> {
        let Shared { file, limits, .. } = &*self.shared;
        let len_bytes = file.notice_len().map_err(|error| error.to_string())?;
        let found = len_bytes / u64::from(limits.block_size);
        self.shared.block_count.fetch_max(found, Ordering::Relaxed);
        Ok(found)
    }

    fn takes_lent(&self) -> Result<u32, String> {
        if !self.has_ring {
            return Err(format!("its engine is {}, expected io_uring", self.engine));
        }
        Ok(self.shared.direct.map_or(1, |alignment| alignment.memory_bytes))
    }

    fn is_resizable(&self) -> bool {
        self.shared.limits.support != READING
    }

    fn resize(&self, block_count: u64) -> Result<(), String> {
        let Shared { file, limits, uncorrectable, .. } = &*self.shared;
        let refuse = |found: &str, expected: &str| {
            Err(format!("resize {}: {found}, expected {expected}", file.path().display()))
        };
        if !self.is_resizable() {
            return refuse("it was opened to be read", "one that was opened to be written");
        }
        let len_bytes = block_count.checked_mul(u64::from(limits.block_size));
        let Some(len_bytes) = len_bytes.filter(|bytes| *bytes > 0) else {
            return refuse(
                &format!("{block_count} blocks"),
                "at least 1, and fewer than 2^64 bytes",
            );
        };
        let before = self.shared.block_count();
        if block_count < before {
            // First, so that nobody begins what would lie past the end.
            self.shared.block_count.store(block_count, Ordering::Relaxed);
        }
        if let Err(error) = file.resize(len_bytes) {
            self.shared.block_count.store(before, Ordering::Relaxed);
            return Err(error.to_string());
        }
        uncorrectable.clear(block_count, u64::MAX);
        self.shared.block_count.store(block_count, Ordering::Relaxed);
        Ok(())
    }
}

impl Shared {
    fn limits(&self) -> Limits {
        Limits { block_count: self.block_count(), ..self.limits.clone() }
    }

    /// A number by itself: it orders nothing.
    #[inline]
    fn block_count(&self) -> u64 {
        self.block_count.load(Ordering::Relaxed)
    }
}

impl Loan {
    fn take(shared: &Arc<Shared>) -> Result<Self, String> {
        let memory = memory(&shared.regions, CHUNK_BYTES * u32::from(BUFFERS))?;
        Ok(Self { shared: Arc::clone(shared), memory })
    }

    fn buffer(&self, index: u16) -> Segment {
        let offset = u64::from(index) * u64::from(CHUNK_BYTES);
        Segment { region: self.memory.id(), offset, len_bytes: CHUNK_BYTES }
    }
}

/// Finds out which engine the channels will have, so that it is known, or refused, at start.
/// Whether that is a ring is told, too.
fn try_engine(
    file: &Arc<File>,
    regions: &Regions,
    choice: Choice,
) -> Result<(String, bool), MediumError> {
    let capacity = Capacity { depth: 1, segments_max: 1 };
    let engine = Engine::new(Arc::clone(file), regions, capacity, choice)
        .map_err(|error| MediumError::new(error.blame(), format!("file: {error}")))?;
    let name = match engine.why_no_ring() {
        Some(errno) => format!("{} (io_uring is refused: {errno})", engine.name()),
        None => engine.name().into(),
    };
    Ok((name, engine.takes_lent()))
}

/// What can be done with a file that is only read.
const READING: Support =
    Support::of(&[Operation::Read, Operation::Compare, Operation::Verify, Operation::Flush]);

/// Whole blocks from the start of an extent on: a hole is as many as lie in it, data as many as it
/// touches. A block of which only the start is a hole is data.
fn in_blocks(found: FileExtent, block_size: u64) -> Extent {
    let whole = found.len_bytes / block_size;
    if found.is_hole && whole > 0 {
        return Extent { blocks: whole, holds: Holds::Hole };
    }
    Extent { blocks: found.len_bytes.div_ceil(block_size), holds: Holds::Data }
}

fn limits(file: &File, block_size: u32) -> Limits {
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
        support: Support::of(&Operation::ALL).without(Support::of(&[Operation::CompareAndWrite])),
    }
}

fn memory(regions: &Regions, len_bytes: u32) -> Result<Region, String> {
    regions.allocate(len_bytes as usize).map_err(|error| error.to_string())
}
