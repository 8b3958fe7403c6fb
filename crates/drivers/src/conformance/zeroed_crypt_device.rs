//! A cipher over a device, for the tests of devices that are placed on others.
//!
//! The crate with the cipher depends on this one; only tests depend on it.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{BlockDevice, CompletionBatch, Instant, Memory, Operation, Request};
use tenmil_dma::RegionTable;

use tenmil_base::Error;
use tenmil_block::{DeviceType, OpenedDevice, Opener, uri::Uri};

/// Opens `crypt:[URI]` with its own key, and fills it with zeroes, as read through the cipher, until
/// [`stop_zeroing_on_open`](Self::stop_zeroing_on_open) is called.
pub(super) struct ZeroedCryptType {
    directory: tempfile::TempDir,
    keeps: AtomicBool,
}

impl ZeroedCryptType {
    pub(super) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        let key: Vec<u8> = (0..64).collect();
        #[expect(clippy::disallowed_methods, reason = "a test may")]
        std::fs::write(&path, key).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        Self { directory, keeps: AtomicBool::new(false) }
    }

    /// From now on, opened devices keep their contents.
    pub(super) fn stop_zeroing_on_open(&self) {
        self.keeps.store(true, Ordering::Relaxed);
    }
}

impl DeviceType for ZeroedCryptType {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let below = opener.open(uri.single_child()?)?;
        let key = tenmil_crypt::XtsKey::read(&self.directory.path().join("key")).unwrap();
        let crypt =
            tenmil_crypt::CryptDevice::new(opener.regions, Arc::clone(&below.medium), key).unwrap();
        if !self.keeps.load(Ordering::Relaxed) {
            write_zeroes_to_device(&crypt, opener.regions);
        }
        let description = format!("crypt: over {}", below.description);
        Ok(below.with_device_stacked_on(Arc::new(crypt), description))
    }
}

/// Writes zeroes to a whole device, durably.
fn write_zeroes_to_device(medium: &dyn BlockDevice, regions: &RegionTable) {
    let limits = medium.limits();
    let most = limits.request_blocks_max.min((64 << 10) / limits.block_size);
    let memory = regions.allocate_region((most * limits.block_size) as usize).unwrap();
    regions.fill(memory.segment(), 0).unwrap();
    let mut channel = medium.channel().unwrap();
    let mut completions = CompletionBatch::with_capacity(1);
    let mut now = Instant { ns: 1 };
    let mut run = |request: Request| {
        let segment = memory.segment().slice(0, request.blocks * limits.block_size).unwrap();
        let mut taken = 0;
        while completions.as_slice().is_empty() {
            now.ns += 1_000;
            now =
                if channel.wake_at() == Instant::NEVER { now } else { now.max(channel.wake_at()) };
            if taken == 0 {
                taken = channel.submit(now, &[request], &[segment]);
            }
            channel.flush_submissions();
            channel.poll(now, &mut completions);
        }
        completions.drain().for_each(|completion| assert!(completion.status.is_success()));
    };
    for lba in (0..limits.block_count).step_by(most as usize) {
        let left = limits.block_count - lba;
        let blocks = most.min(u32::try_from(left).unwrap_or(most));
        run(Request {
            lba,
            blocks,
            segment_count: 1,
            operation: Operation::Write,
            ..Request::PLACEHOLDER
        });
    }
    run(Request { operation: Operation::Flush, ..Request::PLACEHOLDER });
}
