//! A device as a block device of the kernel, where neither nvme-tcp nor ublk is there: a file of a FUSE mount, and
//! a loop device over it.
//!
//! ```text
//!   mkfs, mount ─▶ /dev/loopN ─▶ DIRECTORY/disk ─▶ /dev/fuse ─▶ a thread here ─▶ tcp:
//! ```
//!
//! It has the arguments and the first line of `tenmil serve URI --listen ublk:`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;
use tenmil::{Access, Device, Runtime};

use crate::fuse_mount::FuseMount;
use crate::fuse_protocol::{
    FileSize, FuseOperation, FuseReply, FuseRequest, ROOT, errno, is_root_node,
};
use crate::operate::run_program;

/// Options of the server of a loop device: those that the CSI driver gives to `tenmil serve`.
#[derive(Debug, clap::Args)]
pub(crate) struct LoopDiskOptions {
    /// Device
    uri: String,
    /// As for ublk
    #[arg(long)]
    listen: String,
    /// Print the first line as JSON
    #[arg(long)]
    json: bool,
    /// Name of the process
    #[arg(long)]
    instance: String,
}

/// Device behind a file.
struct LoopFile {
    runtime: Runtime,
    /// It is opened again when it has grown, and none meanwhile.
    device: Mutex<Option<Arc<Device>>>,
}

/// Node number of the file.
const FILE: u64 = ROOT + 1;
const NAME: &str = "disk";
const THREADS: usize = 2;
/// Interval at which the size of the device is queried.
const SIZE_INTERVAL: Duration = Duration::from_millis(500);
/// Time for requests of the former device to end.
const OPEN_TIME_MAX: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Largest part of a request that one buffer has.
const BUFFER_BYTES: u64 = 1 << 20;

/// Serves the device until SIGTERM.
pub(crate) fn serve_loop_disk(options: &LoopDiskOptions) -> Result<bool, String> {
    tenmil_linux::signal::request_stop_on_sigint_or_sigterm().map_err(|why| why.to_string())?;
    let runtime = Runtime::builder().cores([0]).buffer_bytes(16 << 20).start();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let device = open(&runtime, &options.uri, Access::ReadWrite)?;
    let block_bytes = device.limits().block_size;
    let file = Arc::new(LoopFile { runtime, device: Mutex::new(Some(Arc::new(device))) });
    let directory = PathBuf::from(format!("/tmp/tenmil-{}", options.instance));
    let served = Arc::clone(&file);
    let serve = move |bytes: &[u8]| served.serve_request(bytes);
    let mount = FuseMount::new(&directory, "tenmil-csi", THREADS, Arc::new(serve))?;
    let disk = LoopDevice::new(&directory.join(NAME), block_bytes)?;
    println!("{}", json!({ "ready": true, "connect": [disk.path], "uri": options.uri }));
    let mut queried = Instant::now();
    while !tenmil_linux::signal::is_stop_requested() {
        if queried.elapsed() > SIZE_INTERVAL {
            queried = Instant::now();
            if file.has_grown(&options.uri)? {
                file.open_again(&options.uri)?;
                disk.read_size_again()?;
            }
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    drop(disk);
    drop(mount);
    let _ = std::fs::remove_dir(&directory);
    Ok(true)
}

fn open(runtime: &Runtime, uri: &str, access: Access) -> Result<Device, String> {
    let opened = runtime.block_on(runtime.open(uri, access));
    opened.map_err(|error| error.to_string())
}

fn size_of(device: &Device) -> u64 {
    let limits = device.limits();
    limits.block_count * u64::from(limits.block_size)
}

/// Loop device, detached on drop.
struct LoopDevice {
    path: String,
    file: PathBuf,
}

impl LoopDevice {
    fn new(file: &Path, block_bytes: u32) -> Result<Self, String> {
        let block_bytes = block_bytes.to_string();
        let arguments = ["--find", "--show", "--sector-size", &block_bytes];
        let path = run_program(Command::new("losetup").args(arguments).arg(file))?;
        Ok(Self { path: path.trim().to_owned(), file: file.to_owned() })
    }

    fn read_size_again(&self) -> Result<(), String> {
        // The loop device has the size that the kernel knows of the file: it is queried first.
        std::fs::metadata(&self.file).map_err(|why| format!("{}: {why}", self.file.display()))?;
        run_program(Command::new("losetup").args(["--set-capacity", &self.path])).map(drop)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.path]).status();
    }
}

impl LoopFile {
    fn device(&self) -> Result<Arc<Device>, i32> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(errno::IO)
    }

    fn size(&self) -> Result<FileSize, i32> {
        let len = size_of(&*self.device()?);
        Ok(FileSize { len, allocated_bytes: len })
    }

    /// Whether another connection sees a larger device.
    fn has_grown(&self, uri: &str) -> Result<bool, String> {
        let device = open(&self.runtime, uri, Access::ReadOnly)?;
        Ok(self.size().is_ok_and(|size| size_of(&device) > size.len))
    }

    /// Opens the device again. Requests wait, or have the former one.
    fn open_again(&self, uri: &str) -> Result<(), String> {
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        *device = None;
        let begun = Instant::now();
        loop {
            match open(&self.runtime, uri, Access::ReadWrite) {
                Ok(new) => {
                    *device = Some(Arc::new(new));
                    return Ok(());
                }
                Err(why) if begun.elapsed() > OPEN_TIME_MAX => return Err(why),
                Err(_) => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }

    fn serve_request(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let request = FuseRequest::parse(bytes);
        match request.operation {
            FuseOperation::Note => None,
            _ => Some(FuseReply::into_bytes(self.handle_request(&request, bytes), request.unique)),
        }
    }

    fn handle_request(&self, request: &FuseRequest, bytes: &[u8]) -> Result<FuseReply, i32> {
        match &request.operation {
            FuseOperation::Init { minor } => Ok(FuseReply::init_result(*minor)),
            FuseOperation::Lookup { name } if name == NAME => {
                Ok(FuseReply::entry_result(FILE, Some(self.size()?)))
            }
            FuseOperation::Lookup { .. } => Err(errno::NOENT),
            FuseOperation::Attributes if is_root_node(request.node) => {
                Ok(FuseReply::attributes_result(ROOT, None))
            }
            FuseOperation::Attributes => Ok(FuseReply::attributes_result(FILE, Some(self.size()?))),
            FuseOperation::Open => Ok(FuseReply::open_result(0)),
            FuseOperation::OpenDirectory => Ok(FuseReply::opendir_result(0)),
            FuseOperation::List { offset } => {
                let name = NAME.to_owned();
                Ok(FuseReply::directory_entries([(&name, FILE)].into_iter(), *offset))
            }
            FuseOperation::Read { offset, len } => self.read(*offset, *len),
            FuseOperation::Write { offset, at, len, .. } => {
                let data = bytes.get(*at..*at + *len).ok_or(errno::INVAL)?;
                self.write(*offset, data)?;
                Ok(FuseReply::write_result(*len))
            }
            FuseOperation::Sync => {
                let device = self.device()?;
                self.runtime.block_on(device.flush()).map_err(|_| errno::IO)?;
                Ok(FuseReply::empty())
            }
            FuseOperation::Statistics => Ok(FuseReply::statfs_result()),
            FuseOperation::Close | FuseOperation::SyncDirectory => Ok(FuseReply::empty()),
            FuseOperation::Unknown => Err(errno::NOSYS),
            _ => Err(errno::OPNOTSUPP),
        }
    }

    fn read(&self, offset: u64, len: usize) -> Result<FuseReply, i32> {
        let device = self.device()?;
        let end = offset.saturating_add(len as u64).min(size_of(&device));
        let mut data = Vec::with_capacity(len);
        let mut at = offset;
        while at < end {
            let part = (end - at).min(BUFFER_BYTES);
            let (lba, buffer) = buffer_of(&device, at, part)?;
            let read = self.runtime.block_on(device.read(lba, buffer)).map_err(|_| errno::IO)?;
            data.extend(read.to_vec());
            at += part;
        }
        Ok(FuseReply::data_bytes(data))
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), i32> {
        let device = self.device()?;
        let chunk = usize::try_from(BUFFER_BYTES).unwrap_or(usize::MAX);
        for (index, part) in data.chunks(chunk).enumerate() {
            let at = offset + index as u64 * BUFFER_BYTES;
            let (lba, mut buffer) = buffer_of(&device, at, part.len() as u64)?;
            buffer.store(0, part);
            self.runtime.block_on(device.write(lba, buffer)).map_err(|_| errno::IO)?;
        }
        Ok(())
    }
}

/// Block number and a buffer for a part of the device, which the kernel aligns to its sectors.
fn buffer_of(device: &Device, offset: u64, len: u64) -> Result<(u64, tenmil::Buffer), i32> {
    let block = u64::from(device.limits().block_size);
    if !offset.is_multiple_of(block) || !len.is_multiple_of(block) {
        return Err(errno::INVAL);
    }
    let len = u32::try_from(len).map_err(|_| errno::INVAL)?;
    Ok((offset / block, device.buffer(len).map_err(|_| errno::IO)?))
}
