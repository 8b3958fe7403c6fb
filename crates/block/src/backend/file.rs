//! The medium that is a file or a block device: what was flushed is there the next time.

mod channel;
mod work;

use std::path::PathBuf;
use std::sync::Arc;

use base::{Backend, Blame, Durability, Limits, Medium, Operation, Segment, Support};
use dma::{Region, Regions};
use host::engine::{Capacity, Choice, Engine};
use host::file::{File, FileOptions};

use self::channel::FileChannel;
use super::marks::Marks;
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
/// has holes. Marks of uncorrectable blocks are kept in memory only and end with the medium.
#[derive(Debug)]
pub struct FileMedium {
    shared: Arc<Shared>,
    choice: Choice,
    engine: String,
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
    /// How to talk to the kernel.
    pub engine: Choice,
}

/// What all channels use.
#[derive(Debug)]
struct Shared {
    file: Arc<File>,
    regions: Regions,
    limits: Limits,
    /// Blocks that cannot be read until they are written.
    uncorrectable: Marks,
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
/// 64 pages and the one that an unaligned start adds.
const SEGMENTS_MAX: u16 = 65;
const CAPACITY: Capacity = Capacity { depth: DEPTH_MAX, segments_max: SEGMENTS_MAX };

/// Opens `file:PATH?size=1g&block=512&direct=yes&engine=auto`.
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
    let engine = fields.choice("engine", &engines)?.unwrap_or_default();
    fields.finish()?;
    size_bytes.map(|size| block_count(uri, size, block_size)).transpose()?;
    let path = PathBuf::from(uri.path());
    let options = FileMediumOptions { path, size_bytes, block_size, direct, engine };
    let medium = FileMedium::open(opener.regions, &options)?;
    let (description, existing) = (medium.describe(), medium.existing().into_iter().collect());
    Ok(Opened { existing, ..Opened::fresh(Arc::new(medium), description) })
}

impl FileMedium {
    /// Opens, makes or grows the file. Requests name memory of `regions`, in which the medium and
    /// each channel take a place of their own.
    pub fn open(regions: &Regions, options: &FileMediumOptions) -> Result<Self, MediumError> {
        let FileMediumOptions { path, size_bytes, block_size, direct, engine } = options;
        let (block_size, direct, choice) = (*block_size, *direct, *engine);
        check_geometry("file", block_size, size_bytes.unwrap_or(u64::MAX))?;
        let (path, len_bytes) = (path.clone(), *size_bytes);
        let options = FileOptions { path, len_bytes, unit_bytes: block_size, direct };
        let file = File::open(&options)
            .map_err(|error| MediumError::new(error.blame(), format!("file: {error}")))?;
        let file = Arc::new(file);
        let engine = try_engine(&file, regions, choice)?;
        let zeroes = memory(regions, CHUNK_BYTES)
            .map_err(|text| MediumError::new(Blame::Machine, format!("file: {text}")))?;
        let limits = limits(&file, block_size);
        let shared = Shared {
            uncorrectable: Marks::new(limits.block_count),
            file,
            regions: regions.clone(),
            limits,
            zeroes,
        };
        Ok(Self { shared: Arc::new(shared), choice, engine })
    }

    /// What a write would destroy: whatever was in the file before it was opened.
    pub fn existing(&self) -> Option<Existing> {
        let file = &self.shared.file;
        let found = format!("{} bytes", file.found_bytes());
        let name = file.path().display().to_string();
        (file.found_bytes() > 0).then_some(Existing { name, found })
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
        self.shared.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let Shared { file, regions, .. } = &*self.shared;
        let loan = Loan::take(&self.shared)?;
        let engine = Engine::new(Arc::clone(file), regions, CAPACITY, self.choice);
        let engine = engine.map_err(|error| error.to_string())?;
        Ok(Box::new(FileChannel::new(engine, loan)))
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
fn try_engine(file: &Arc<File>, regions: &Regions, choice: Choice) -> Result<String, MediumError> {
    let capacity = Capacity { depth: 1, segments_max: 1 };
    let engine = Engine::new(Arc::clone(file), regions, capacity, choice)
        .map_err(|error| MediumError::new(error.blame(), format!("file: {error}")))?;
    Ok(match engine.why_no_ring() {
        Some(errno) => format!("{} (io_uring is refused: {errno})", engine.name()),
        None => engine.name().into(),
    })
}

fn limits(file: &File, block_size: u32) -> Limits {
    let durability = if file.is_in_memory() { Durability::None } else { Durability::VolatileCache };
    Limits {
        block_size,
        metadata_size: 0,
        block_count: file.len_bytes() / u64::from(block_size),
        request_blocks_max: CHUNK_BYTES / block_size,
        segments_max: SEGMENTS_MAX,
        optimal_boundary_blocks: 0,
        atomic_write_blocks: 1,
        depth_max: u32::from(DEPTH_MAX),
        durability,
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
        Answers, Backend, Blame, Flags, Instant, Medium, Memory, Operation, Outcome, Request,
        Segment,
    };
    use dma::{Backing, Mapping, Regions};
    use host::engine::Choice;

    use super::{FileMedium, FileMediumOptions};

    const BLOCK: u32 = 4096;

    fn options(path: &Path, size_bytes: Option<u64>) -> FileMediumOptions {
        let (path, engine) = (path.into(), Choice::Best);
        FileMediumOptions { path, size_bytes, block_size: BLOCK, direct: true, engine }
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
