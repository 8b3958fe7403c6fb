//! A file system of this process: a FUSE mount, and the threads that serve its requests.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::fuse_protocol::WRITE_BYTES_MAX;

/// Serves a request, and returns the reply if it has one.
pub(crate) type ServeRequest = Arc<dyn Fn(&[u8]) -> Option<Vec<u8>> + Send + Sync>;

/// FUSE mount, unmounted on drop.
#[derive(Debug)]
pub(crate) struct FuseMount {
    path: PathBuf,
}

impl FuseMount {
    /// Mounts at `path`, and serves requests on `threads` threads.
    pub(crate) fn new(
        path: &Path,
        name: &str,
        threads: usize,
        serve: ServeRequest,
    ) -> Result<Self, String> {
        let refuse = |why| format!("mount {}: {why}", path.display());
        std::fs::create_dir_all(path).map_err(|why| refuse(why.to_string()))?;
        let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let fuse = fuse.map_err(|why| refuse(format!("open /dev/fuse: {why}")))?;
        for _ in 0..threads {
            let fuse = fuse.try_clone().map_err(|why| refuse(why.to_string()))?;
            let serve = Arc::clone(&serve);
            let thread = std::thread::Builder::new().name("fuse".to_owned());
            let started = thread.spawn(move || fuse_loop(&serve, fuse));
            started.map_err(|why| refuse(why.to_string()))?;
        }
        // The mount command inherits the descriptor as its standard input (fd=0).
        let mut mount = Command::new("mount");
        mount.args(["--internal-only", "-t", "fuse", "-o"]);
        mount.arg("fd=0,rootmode=40000,user_id=0,group_id=0,nosuid,nodev");
        mount.arg(name).arg(path).stdin(Stdio::from(fuse));
        let output = mount.output().map_err(|why| refuse(why.to_string()))?;
        if !output.status.success() {
            return Err(refuse(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        Ok(Self { path: path.to_owned() })
    }
}

impl Drop for FuseMount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
    }
}

fn fuse_loop(serve: &ServeRequest, mut fuse: File) {
    let mut bytes = vec![0; WRITE_BYTES_MAX + (64 << 10)];
    loop {
        match fuse.read(&mut bytes) {
            Ok(len) => {
                if let Some(answer) = serve(&bytes[..len]) {
                    // If the calling process was killed, the kernel discards the reply.
                    let _ = fuse.write(&answer);
                }
            }
            // ENODEV: unmounted. ENOENT: the request was interrupted. EPERM: not mounted yet.
            Err(why) if why.raw_os_error() == Some(19) => return,
            Err(why) if why.raw_os_error() == Some(1) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(_) => {}
        }
    }
}
