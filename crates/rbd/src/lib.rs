//! Images of a Ceph cluster as block devices: `rbd:POOL/IMAGE[@SNAPSHOT]`.
//!
//! librbd and librados are loaded when the first image is opened. A machine without them, or a program that is linked
//! statically, gets an error that names the package.
//!
//! | module | contents |
//! |---|---|
//! | [`librbd`] | the libraries: all the unsafe code |
//! | [`rbd_uri`] | `rbd:` URIs |
//! | [`cluster`] | connections, shared by the images of a process |
//! | [`open_image`] | an image with its limits, its lock and its loss |
//! | [`rbd_channel`] | requests and completions |
//! | [`rbd_device`] | the block device |
//! | [`watcher`] | resizes, lost locks and removals, by one thread for all images |
//! | [`store_cluster`], [`rados_store`] | the store of a gateway group in an object of a pool |
//! | [`fence`] | clients of former owners of images are blocklisted |
//! | [`images`] | images of a pool and their snapshots: create, list, clone, resize, roll back, delete |
//! | [`ceph_error`] | error numbers of Ceph, by name |
//!
//! # What a user may rely on
//!
//! - A completed write is stored by the cluster: librbd caches no writes, and an image whose options make it do so is
//!   rejected. So there is no volatile write cache, and a failover loses nothing that was completed.
//! - An image that is opened to be written is locked against other clients until it is closed, if it has the feature
//!   `exclusive-lock`. If the lock is lost, the client is blocklisted or the image is deleted, the device is removed, and
//!   its reason is logged and returned as the [`failure_reason`](tenmil_base::BlockDevice::failure_reason).
//! - Calls that block run on threads of their own with a deadline. Requests end after `io-timeout` at the latest.
//!
//! # Unsafe
//!
//! Only [`librbd`] contains unsafe code; its guarantees are stated at its top.

#[forbid(unsafe_code)]
mod ceph_error;
#[forbid(unsafe_code)]
mod cluster;
#[forbid(unsafe_code)]
mod deadline;
#[forbid(unsafe_code)]
pub mod fence;
#[forbid(unsafe_code)]
pub mod images;
mod librbd;
#[forbid(unsafe_code)]
mod open_image;
#[forbid(unsafe_code)]
mod rados_store;
#[forbid(unsafe_code)]
mod rbd_channel;
#[forbid(unsafe_code)]
mod rbd_device;
#[forbid(unsafe_code)]
mod rbd_uri;
#[forbid(unsafe_code)]
mod store_cluster;
#[cfg(test)]
mod tests;
#[forbid(unsafe_code)]
mod watcher;

use std::sync::Arc;

use tenmil_base::{BlockDevice, Error};
use tenmil_block::uri::Uri;
use tenmil_block::{ExistingData, OpenedDevice, Opener};

pub use self::rados_store::RadosStore;
pub use self::store_cluster::{RadosUri, RadosWatch, StoreCluster};

use self::librbd::Functions;
use self::open_image::OpenImage;
use self::rbd_device::RbdDevice;
use self::rbd_uri::RbdUri;
use self::watcher::Watcher;

/// Opens `rbd:POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`.
///
/// # Errors
///
/// If the URI is invalid, librbd is missing, or the image cannot be opened.
pub fn open(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let name = RbdUri::from_uri(uri)?;
    let functions =
        Functions::installed().map_err(|error| error.with_context(format!("open {uri:#}")))?;
    open_with_functions(functions, opener, uri, &name)
}

fn open_with_functions(
    functions: &'static Functions,
    opener: &Opener<'_>,
    uri: &Uri,
    name: &RbdUri,
) -> Result<OpenedDevice, Error> {
    let watcher = Watcher::shared()?;
    let image = OpenImage::open(functions, opener, uri, name, watcher.signal())?;
    let description = describe(functions, &image);
    let limits = image.limits();
    let bytes = limits.block_count.saturating_mul(u64::from(limits.block_size));
    let data =
        ExistingData { name: format!("{uri:#}"), found: format!("{bytes} bytes"), path: None };
    let existing = if image.is_writable() { vec![data] } else { Vec::new() };
    let device: Arc<dyn BlockDevice> = Arc::new(RbdDevice::new(opener, uri, image, watcher)?);
    Ok(OpenedDevice { existing, ..OpenedDevice::without_existing_data(device, description) })
}

fn describe(functions: &Functions, image: &OpenImage) -> String {
    let (major, minor, extra) = functions.version();
    let (fsid, objects) = (image.fsid(), image.object_bytes() >> 10);
    let lock = match (image.is_writable(), image.keeps_lock()) {
        (false, _) => "read-only",
        (true, true) => "locked for this client",
        (true, false) => "not locked",
    };
    format!(
        "image of Ceph cluster {fsid} by librbd {major}.{minor}.{extra}, objects of {objects} KiB, {lock}"
    )
}
