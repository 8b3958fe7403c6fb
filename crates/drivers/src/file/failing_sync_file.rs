//! A file whose flushes fail, for the tests of everything that stands on files: the kernel reports a lost
//! write, once.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_base::{BlockDevice, IoChannel, Limits, WakeSource};
use tenmil_dma::RegionTable;
use tenmil_linux::Errno;
use tenmil_linux::file_engine::{EngineChoice, FileEngine, FileOp, JobCompletion, SubmitError};
use tenmil_linux::storage_file::{BufferedReason, DirectIoAlignment};

use super::file_channel::SYNC;
use super::{CAPACITY, FileDevice, FileDeviceOptions, FileIo};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{DeviceType, OpenedDevice, Opener};

/// Opens `failing:PATH?block=4096&direct=yes`, a file that is there, of which the next syncs fail that are
/// counted here.
#[derive(Clone, Debug, Default)]
pub(crate) struct FailingSyncFileType {
    pub(crate) syncs: Arc<AtomicU32>,
}

#[derive(Debug)]
struct FailingSyncFile {
    file: FileDevice,
    regions: RegionTable,
    syncs: Arc<AtomicU32>,
}

#[derive(Debug)]
struct FailingSyncEngine {
    engine: FileEngine,
    syncs: Arc<AtomicU32>,
}

impl FailingSyncFileType {
    /// The next `count` syncs of any channel fail.
    pub(crate) fn fail_next_syncs(&self, count: u32) {
        self.syncs.store(count, Ordering::Relaxed);
    }
}

impl DeviceType for FailingSyncFileType {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let mut fields = uri.options();
        let block_size = fields.block_size()?.unwrap_or(512);
        let direct =
            fields.choice_value("direct", &[("yes", true), ("no", false)])?.unwrap_or(true);
        fields.reject_unconsumed()?;
        let options = FileDeviceOptions {
            path: PathBuf::from(uri.path()),
            size_bytes: None,
            block_size,
            direct,
            read_only: false,
            engine: EngineChoice::Threads,
        };
        // Whether the file system here has direct transfers does not matter.
        let alignment = DirectIoAlignment { memory_bytes: 4096, offset_bytes: 512 };
        let alignment = if direct { Ok(alignment) } else { Err(BufferedReason::Requested) };
        let file = FileDevice::open_with_alignment(opener.regions, &options, alignment)?;
        let (regions, syncs) = (opener.regions.clone(), Arc::clone(&self.syncs));
        let medium = Arc::new(FailingSyncFile { file, regions, syncs });
        Ok(OpenedDevice::without_existing_data(medium, "a file whose flushes fail"))
    }
}

impl BlockDevice for FailingSyncFile {
    fn limits(&self) -> Limits {
        Limits { durability: tenmil_base::Durability::VolatileCache, ..self.file.limits() }
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let file = Arc::clone(&self.file.shared.file);
        let engine = FileEngine::new(file, &self.regions, CAPACITY, EngineChoice::Threads);
        let engine = engine.map_err(Error::environment)?;
        self.file
            .open_channel_with_engine(FailingSyncEngine { engine, syncs: Arc::clone(&self.syncs) })
    }
}

impl FileIo for FailingSyncEngine {
    fn submit(&mut self, token: u64, job: FileOp<'_>) -> Result<(), SubmitError> {
        self.engine.submit(token, job)
    }

    fn flush_submissions(&mut self) {
        self.engine.flush();
    }

    fn poll(&mut self, ended: &mut Vec<JobCompletion>) {
        let before = ended.len();
        self.engine.poll(ended);
        for one in ended[before..].iter_mut().filter(|one| one.token == SYNC) {
            let fails = |left: u32| left.checked_sub(1);
            let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
            if self.syncs.fetch_update(set, fetch, fails).is_ok() {
                one.result = Err(Errno::IO);
            }
        }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        FileIo::wake_source(&self.engine)
    }

    fn arm(&mut self) -> bool {
        self.engine.arm()
    }

    fn disarm(&mut self) {
        self.engine.disarm();
    }

    fn has_unsubmitted(&self) -> bool {
        self.engine.has_unsubmitted()
    }
}
