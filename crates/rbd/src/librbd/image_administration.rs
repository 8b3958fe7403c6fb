//! Images of a pool: create, clone, list, resize, delete, and their snapshots. Every call blocks until the cluster has
//! answered.

use std::ffi::{c_char, c_int};
use std::ptr;

use super::connection::PoolContext;
use super::functions::{
    Functions, IMAGE_OPTION_CLONE_FORMAT, IMAGE_OPTION_ORDER, ImageOptions, NamedImage,
    SnapshotInfo,
};
use super::image::Image;
use super::{CephErrno, c_string, check, owned_text};

/// An image of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpec {
    /// Its identifier.
    pub id: String,
    /// Its name.
    pub name: String,
}

/// A snapshot of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRow {
    /// Its identifier.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Size of the image when it was made, in bytes.
    pub size_bytes: u64,
}

/// Options of a new image.
struct NewImageOptions {
    functions: &'static Functions,
    handle: ImageOptions,
}

/// Entries of a list that are read at first; a longer list is read again with its length.
const ENTRIES: usize = 256;
const SNAPSHOTS: c_int = 256;

/// Clone format 2: the parent snapshot need not be protected, and may be deleted.
const CLONE_FORMAT: u64 = 2;

impl PoolContext {
    /// The images of the pool and namespace, by name.
    pub(crate) fn list_images(&self) -> Result<Vec<ImageSpec>, CephErrno> {
        let functions = self.connection.functions;
        let mut entries = Vec::new();
        let mut count = ENTRIES;
        loop {
            entries.resize(count, NamedImage { id: ptr::null_mut(), name: ptr::null_mut() });
            // SAFETY: the pool is open, and the list has `count` entries.
            let listed =
                unsafe { (functions.rbd_list2)(self.handle, entries.as_mut_ptr(), &raw mut count) };
            match check(listed) {
                // The list was longer, and `count` is its length by now.
                Err(CephErrno(libc::ERANGE)) => {}
                Err(errno) => return Err(errno),
                Ok(_) => break,
            }
        }
        let mut images: Vec<ImageSpec> = entries[..count]
            .iter()
            .map(|NamedImage { id, name }| ImageSpec {
                id: owned_text(*id),
                name: owned_text(*name),
            })
            .collect();
        // SAFETY: librbd has filled `count` entries, which are freed once.
        unsafe { (functions.rbd_image_spec_list_cleanup)(entries.as_mut_ptr(), count) };
        images.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        Ok(images)
    }

    /// Creates an image. Its objects have 2^`object_order` bytes, or as many as the configuration states.
    pub(crate) fn create_image(
        &self,
        name: &str,
        size_bytes: u64,
        object_order: Option<u8>,
    ) -> Result<(), CephErrno> {
        let (functions, name) = (self.connection.functions, c_string(name)?);
        let options = NewImageOptions::new(functions);
        if let Some(order) = object_order {
            options.set(IMAGE_OPTION_ORDER, order.into())?;
        }
        // SAFETY: the pool is open, the name is a C string, and the options exist.
        let created = unsafe {
            (functions.rbd_create4)(self.handle, name.as_ptr(), size_bytes, options.handle)
        };
        check(created).map(drop)
    }

    /// Creates an image in `into` that is a clone of a snapshot.
    pub(crate) fn clone_image(
        &self,
        parent: &str,
        snapshot: &str,
        into: &Self,
        name: &str,
    ) -> Result<(), CephErrno> {
        let functions = self.connection.functions;
        let [parent, snapshot, name] = [c_string(parent)?, c_string(snapshot)?, c_string(name)?];
        let options = NewImageOptions::new(functions);
        options.set(IMAGE_OPTION_CLONE_FORMAT, CLONE_FORMAT)?;
        let [parent, snapshot, name] = [parent.as_ptr(), snapshot.as_ptr(), name.as_ptr()];
        let (from, to) = (self.handle, into.handle);
        // SAFETY: both pools are open, the names are C strings, and the options exist.
        let cloned =
            unsafe { (functions.rbd_clone3)(from, parent, snapshot, to, name, options.handle) };
        check(cloned).map(drop)
    }

    /// Deletes an image.
    ///
    /// # Errors
    ///
    /// ENOTEMPTY if it has snapshots, EBUSY if a client has it open.
    pub(crate) fn remove_image(&self, name: &str) -> Result<(), CephErrno> {
        let name = c_string(name)?;
        // SAFETY: the pool is open, and the name is a C string.
        check(unsafe { (self.connection.functions.rbd_remove)(self.handle, name.as_ptr()) })
            .map(drop)
    }
}

impl Image {
    /// Changes the size.
    pub(crate) fn resize(&self, size_bytes: u64) -> Result<(), CephErrno> {
        let (functions, handle) = self.functions_and_handle();
        // SAFETY: the image is open.
        check(unsafe { (functions.rbd_resize)(handle, size_bytes) }).map(drop)
    }

    /// Copies what a clone reads from its parent, so that it needs it no longer.
    pub(crate) fn flatten(&self) -> Result<(), CephErrno> {
        let (functions, handle) = self.functions_and_handle();
        // SAFETY: the image is open.
        check(unsafe { (functions.rbd_flatten)(handle) }).map(drop)
    }

    /// Creates a snapshot.
    pub(crate) fn create_snapshot(&self, name: &str) -> Result<(), CephErrno> {
        let functions = self.functions_and_handle().0;
        self.call_with_snapshot(functions.rbd_snap_create, name)
    }

    /// Deletes a snapshot.
    pub(crate) fn remove_snapshot(&self, name: &str) -> Result<(), CephErrno> {
        let functions = self.functions_and_handle().0;
        self.call_with_snapshot(functions.rbd_snap_remove, name)
    }

    /// Sets the image back to a snapshot.
    pub(crate) fn roll_back(&self, snapshot: &str) -> Result<(), CephErrno> {
        let functions = self.functions_and_handle().0;
        self.call_with_snapshot(functions.rbd_snap_rollback, snapshot)
    }

    fn call_with_snapshot(
        &self,
        call: unsafe extern "C" fn(super::functions::ImageHandle, *const c_char) -> c_int,
        name: &str,
    ) -> Result<(), CephErrno> {
        let name = c_string(name)?;
        // SAFETY: the image is open, and the name is a C string.
        check(unsafe { call(self.functions_and_handle().1, name.as_ptr()) }).map(drop)
    }

    /// The snapshots, oldest first.
    pub(crate) fn list_snapshots(&self) -> Result<Vec<SnapshotRow>, CephErrno> {
        let (functions, handle) = self.functions_and_handle();
        let mut entries = Vec::new();
        let mut count = SNAPSHOTS;
        let found = loop {
            let len = usize::try_from(count).unwrap_or(0);
            entries.resize(len, SnapshotInfo { id: 0, size: 0, name: ptr::null() });
            let (list, count) = (entries.as_mut_ptr(), &raw mut count);
            // SAFETY: the image is open, and the list has `count` entries.
            match check(unsafe { (functions.rbd_snap_list)(handle, list, count) }) {
                // The list was longer, and `count` is its length by now.
                Err(CephErrno(libc::ERANGE)) => {}
                Err(errno) => return Err(errno),
                Ok(found) => break usize::try_from(found).unwrap_or(0),
            }
        };
        let row = |info: &SnapshotInfo| SnapshotRow {
            id: info.id,
            name: owned_text(info.name),
            size_bytes: info.size,
        };
        let mut rows: Vec<SnapshotRow> =
            entries[..found.min(entries.len())].iter().map(row).collect();
        if found > 0 {
            // SAFETY: librbd has filled the entries, and ended the list with a name that is null.
            unsafe { (functions.rbd_snap_list_end)(entries.as_mut_ptr()) };
        }
        rows.sort_unstable_by_key(|row| row.id);
        Ok(rows)
    }
}

impl NewImageOptions {
    fn new(functions: &'static Functions) -> Self {
        let mut handle: ImageOptions = ptr::null_mut();
        // SAFETY: the handle is stored to a variable that outlives the call.
        unsafe { (functions.rbd_image_options_create)(&raw mut handle) };
        Self { functions, handle }
    }

    fn set(&self, option: c_int, value: u64) -> Result<(), CephErrno> {
        let set = self.functions.rbd_image_options_set_uint64;
        // SAFETY: the options exist.
        check(unsafe { set(self.handle, option, value) }).map(drop)
    }
}

impl Drop for NewImageOptions {
    fn drop(&mut self) {
        // SAFETY: the options exist, and are not used after this.
        unsafe { (self.functions.rbd_image_options_destroy)(self.handle) };
    }
}
