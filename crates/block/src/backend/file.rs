//! The medium that is a file or a block device: what was flushed is there the next time.

mod channel;
mod jobs;
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use base::{
        Answers, Backend, Blame, Extent, Flags, Holds, Instant, Medium, Memory, Operation, Outcome,
        Request, Segment,
    };
    use dma::{Backing, Lender, Mapping, Regions};
    use host::engine::Choice;
    use host::file::{Alignment, FileExtent};

    use super::channel::goes_directly;
    use super::{FileMedium, FileMediumOptions, in_blocks};

    const BLOCK: u32 = 4096;

    fn options(path: &Path, size_bytes: Option<u64>) -> FileMediumOptions {
        let (path, engine) = (path.into(), Choice::Best);
        let (direct, read_only) = (true, false);
        FileMediumOptions { path, size_bytes, block_size: BLOCK, direct, read_only, engine }
    }

    fn run(
        channel: &mut dyn Backend,
        operation: Operation,
        blocks: u32,
        memory: Segment,
    ) -> Outcome {
        let moves = matches!(operation, Operation::Read | Operation::Write);
        let request = Request {
            token: 1,
            lba: 16,
            operand: 0,
            blocks,
            segment_first: 0,
            segment_count: u16::from(moves),
            metadata_count: 0,
            operation,
            flags: Flags::NONE,
        };
        let mut answers = Answers::with_capacity(1);
        assert_eq!(channel.submit(Instant::default(), &[request], &[memory]), 1);
        channel.flush();
        while channel.poll(Instant::default(), &mut answers) == 0 {
            std::hint::spin_loop();
        }
        answers.as_slice()[0].outcome
    }

    #[test]
    fn what_was_flushed_is_there_when_the_file_is_opened_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        let regions = Regions::new(8);
        let memory = regions.add(Mapping::new(1 << 16, Backing::Private).unwrap()).unwrap();
        for (size_bytes, operation, fill) in
            [(Some(1 << 20), Operation::Write, 0x5a), (None, Operation::Read, 0)]
        {
            let medium = FileMedium::open(&regions, &options(&path, size_bytes)).unwrap();
            assert_eq!(medium.limits().block_count, 256);
            let mut channel = medium.channel().unwrap();
            regions.fill(memory, fill).unwrap();
            assert_eq!(run(&mut *channel, operation, 16, memory), Outcome::SUCCESS);
            assert_eq!(run(&mut *channel, Operation::Flush, 0, memory), Outcome::SUCCESS);
        }
        let mut bytes = vec![0; 1 << 16];
        regions.load(memory, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0x5a));
    }

    #[test]
    fn holes_are_told_as_far_as_they_go() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        let regions = Regions::new(8);
        let memory = regions.add(Mapping::new(1 << 16, Backing::Private).unwrap()).unwrap();
        let medium = FileMedium::open(&regions, &options(&path, Some(1 << 20))).unwrap();
        let extent = |blocks, holds| Ok(Extent { blocks, holds });
        assert_eq!(medium.extent(0), extent(256, Holds::Hole));
        let mut channel = medium.channel().unwrap();
        assert_eq!(run(&mut *channel, Operation::Write, 16, memory), Outcome::SUCCESS);
        assert_eq!(run(&mut *channel, Operation::Flush, 0, memory), Outcome::SUCCESS);
        assert_eq!(medium.extent(3), extent(13, Holds::Hole));
        assert_eq!(medium.extent(17), extent(15, Holds::Data));
        assert_eq!(medium.extent(32), extent(224, Holds::Hole));
        assert_eq!(medium.extent(256), extent(0, Holds::Data), "past the end");
        assert_eq!(run(&mut *channel, Operation::Deallocate, 16, memory), Outcome::SUCCESS);
        assert_eq!(medium.extent(0), extent(256, Holds::Hole));
        let lost = run(&mut *channel, Operation::WriteUncorrectable, 2, memory);
        assert_eq!(lost, Outcome::SUCCESS);
        assert_eq!(medium.extent(0), extent(16, Holds::Hole));
        assert_eq!(medium.extent(16), extent(2, Holds::Data), "it cannot be read as zeroes");
    }

    #[test]
    fn a_file_that_was_shorter_holds_zeroes_where_it_grew_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        let regions = Regions::new(8);
        let memory = regions.add(Mapping::new(1 << 16, Backing::Private).unwrap()).unwrap();
        let medium = FileMedium::open(&regions, &options(&path, Some(1 << 20))).unwrap();
        let mut channel = medium.channel().unwrap();
        regions.fill(memory, 0x5a).unwrap();
        assert_eq!(run(&mut *channel, Operation::Write, 16, memory), Outcome::SUCCESS);
        assert_eq!(run(&mut *channel, Operation::WriteUncorrectable, 4, memory), Outcome::SUCCESS);
        medium.resize(20).unwrap();
        assert_eq!(medium.limits().block_count, 20);
        let past = run(&mut *channel, Operation::Read, 16, memory);
        assert_eq!(past, Outcome::LBA_OUT_OF_RANGE, "blocks 16 to 32");
        assert_eq!(channel.limits().block_count, 20);
        medium.resize(16).unwrap();
        medium.resize(512).unwrap();
        assert_eq!(medium.extent(511), Ok(Extent { blocks: 1, holds: Holds::Hole }));
        assert_eq!(run(&mut *channel, Operation::Read, 16, memory), Outcome::SUCCESS);
        let mut bytes = vec![1; 1 << 16];
        regions.load(memory, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "what was lost is lost, marks too");
        for impossible in [0, u64::MAX] {
            let said = medium.resize(impossible).unwrap_err();
            assert!(said.ends_with("expected at least 1, and fewer than 2^64 bytes"), "{said}");
        }
        assert!(medium.resize(1 << 50).is_err(), "no file system has files of that size");
        assert_eq!(medium.limits().block_count, 512);
    }

    #[test]
    fn what_is_lent_goes_to_a_ring_and_only_there() {
        let directory = tempfile::tempdir().unwrap();
        let regions = Regions::new(8);
        let alignment = Alignment { memory_bytes: 512, offset_bytes: 4096 };
        let mut options = options(&directory.path().join("blocks"), Some(1 << 20));
        let medium = FileMedium::open_as(&regions, &options, Ok(alignment)).unwrap();
        match medium.has_ring {
            true => assert_eq!(medium.takes_lent(), Ok(512)),
            false => println!("skipped: io_uring is not allowed here"),
        }
        let descriptor = tempfile::tempfile().unwrap().into();
        let lender = Lender { descriptor, queue: 0, data_at: |_, _, _| 0 };
        let lent = regions.lend(lender, (4, 1 << 16)).unwrap();
        let goes = |segment| goes_directly(&medium.shared, &[segment]);
        assert!(goes(lent.slice(1 << 16, 8192).unwrap()), "its address is the lender's");
        assert!(!goes(lent.slice(0, 512).unwrap()), "half a block");
        assert!(!goes(lent.slice(1 << 15, 1 << 16).unwrap()), "parts of two requests");
        options.engine = Choice::Threads;
        options.path = directory.path().join("others");
        let refused = FileMedium::open(&regions, &options).unwrap().takes_lent().unwrap_err();
        assert!(refused.contains("threads") && refused.contains("expected io_uring"), "{refused}");
    }

    #[test]
    fn a_block_that_is_partly_a_hole_is_data() {
        for (len_bytes, is_hole, blocks, holds) in [
            (4096, true, 1, Holds::Hole),
            (4095, true, 1, Holds::Data),
            (8191, true, 1, Holds::Hole),
            (4095, false, 1, Holds::Data),
            (8192, false, 2, Holds::Data),
            (8193, false, 3, Holds::Data),
        ] {
            let found = in_blocks(FileExtent { len_bytes, is_hole }, 4096);
            assert_eq!(found, Extent { blocks, holds }, "{len_bytes} {is_hole}");
        }
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test makes the file that is read")]
    fn what_is_only_read_refuses_to_be_changed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        std::fs::write(&path, [7; 1 << 17]).unwrap();
        let regions = Regions::new(8);
        let memory = regions.add(Mapping::new(1 << 16, Backing::Private).unwrap()).unwrap();
        let to_read = FileMediumOptions { read_only: true, ..options(&path, None) };
        let medium = FileMedium::open(&regions, &to_read).unwrap();
        let mut channel = medium.channel().unwrap();
        assert_eq!(run(&mut *channel, Operation::Read, 16, memory), Outcome::SUCCESS);
        for operation in [Operation::Write, Operation::WriteZeroes, Operation::Deallocate] {
            let outcome = run(&mut *channel, operation, 16, memory);
            assert_eq!(outcome, Outcome::INVALID_OPCODE, "{operation:?}");
        }
        assert!(medium.existing().is_none(), "nothing can be lost");
    }

    #[test]
    fn deallocated_blocks_give_their_room_back() {
        let directory = tempfile::tempdir().unwrap();
        let regions = Regions::new(8);
        let memory = regions.add(Mapping::new(1 << 18, Backing::Private).unwrap()).unwrap();
        let options = options(&directory.path().join("blocks"), Some(1 << 20));
        let medium = FileMedium::open(&regions, &options).unwrap();
        let mut channel = medium.channel().unwrap();
        let room = || medium.shared.file.allocated_bytes();
        assert_eq!(run(&mut *channel, Operation::Write, 64, memory), Outcome::SUCCESS);
        assert_eq!(run(&mut *channel, Operation::Flush, 0, memory), Outcome::SUCCESS);
        let full = room();
        assert!(full >= 1 << 18);
        assert_eq!(run(&mut *channel, Operation::Deallocate, 64, memory), Outcome::SUCCESS);
        assert!(room() + (1 << 18) <= full, "{full} {}", room());
    }

    #[test]
    fn a_closed_channels_memory_serves_the_next_one() {
        let directory = tempfile::tempdir().unwrap();
        // One region for the zeroes, two for two channels at a time.
        let regions = Regions::new(3);
        let options = options(&directory.path().join("blocks"), Some(1 << 20));
        let medium = FileMedium::open(&regions, &options).unwrap();
        for _ in 0..5 {
            let two = [medium.channel(), medium.channel()];
            assert!(two.iter().all(Result::is_ok));
            let third = medium.channel().err().unwrap();
            assert!(third.contains("made for 3"), "{third}");
        }
    }

    #[test]
    fn a_medium_says_how_it_moves_its_data() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        let regions = Regions::new(8);
        let mut options = options(&path, Some(1 << 20));
        (options.direct, options.engine) = (false, Choice::Threads);
        let said = FileMedium::open(&regions, &options).unwrap().describe();
        let expected = "by threads, through the page cache, as asked";
        assert_eq!(said, format!("file {} {expected}", path.display()));
    }

    #[test]
    fn a_file_that_cannot_be_a_medium_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let regions = Regions::new(8);
        let missing = options(&directory.path().join("missing"), None);
        let error = FileMedium::open(&regions, &missing).unwrap_err();
        assert_eq!(error.blame(), Blame::Caller);
        assert!(error.to_string().starts_with("file: open "), "{error}");
        let odd = FileMediumOptions { block_size: 1000, ..missing };
        let error = FileMedium::open(&regions, &odd).unwrap_err();
        assert_eq!(
            error.to_string(),
            "file: block size is 1000, expected a power of two from 512 to 65536"
        );
    }
}
