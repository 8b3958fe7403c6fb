//! The functions of librados and librbd, looked up once in a process.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

use tenmil_base::Error;

/// `rados_t`
pub(super) type Rados = *mut c_void;
/// `rados_ioctx_t`
pub(super) type Ioctx = *mut c_void;
/// `rbd_image_t`
pub(super) type ImageHandle = *mut c_void;
/// `rbd_completion_t`
pub(super) type Completion = *mut c_void;
/// `rbd_image_options_t`
pub(super) type ImageOptions = *mut c_void;
/// `rbd_callback_t`
pub(super) type IoCallback = unsafe extern "C" fn(Completion, *mut c_void);
/// `rbd_update_callback_t`
pub(super) type UpdateCallback = unsafe extern "C" fn(*mut c_void);
/// The callback of `rbd_diff_iterate2`: offset, length, whether data exist, argument.
pub(super) type DiffCallback = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// `rados_read_op_t`
pub(super) type ReadOp = *mut c_void;
/// `rados_write_op_t`
pub(super) type WriteOp = *mut c_void;
/// `rados_omap_iter_t`
pub(super) type OmapIterator = *mut c_void;
/// `rados_completion_t`
pub(super) type AioCompletion = *mut c_void;
/// `rados_callback_t`
pub(super) type AioCallback = unsafe extern "C" fn(AioCompletion, *mut c_void);
/// `rados_watchcb2_t`: argument, notification, watch, notifier, data, length.
pub(super) type WatchCallback =
    unsafe extern "C" fn(*mut c_void, u64, u64, u64, *mut c_void, usize);
/// `rados_watcherrcb_t`: argument, watch, error.
pub(super) type WatchErrorCallback = unsafe extern "C" fn(*mut c_void, u64, c_int);

/// `rbd_image_info_t`
#[repr(C)]
pub(super) struct ImageInfo {
    pub(super) size: u64,
    pub(super) object_size: u64,
    pub(super) object_count: u64,
    pub(super) order: c_int,
    pub(super) block_name_prefix: [c_char; 24],
    pub(super) parent_pool: i64,
    pub(super) parent_name: [c_char; 96],
}

/// `rbd_image_spec_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NamedImage {
    pub(super) id: *mut c_char,
    pub(super) name: *mut c_char,
}

/// `rbd_snap_info_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SnapshotInfo {
    pub(super) id: u64,
    pub(super) size: u64,
    pub(super) name: *const c_char,
}

/// `rbd_config_option_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ConfigOption {
    pub(super) name: *mut c_char,
    pub(super) value: *mut c_char,
    pub(super) source: c_int,
}

/// `LIBRADOS_CMPXATTR_OP_EQ`
pub(super) const COMPARE_EQUAL: u8 = 1;
/// `LIBRADOS_CREATE_EXCLUSIVE`
pub(super) const CREATE_EXCLUSIVE: c_int = 1;
/// `LIBRADOS_LOCK_FLAG_MUST_RENEW`
pub(super) const LOCK_MUST_RENEW: u8 = 1 << 1;
/// `EVENT_TYPE_EVENTFD`
pub(super) const EVENT_TYPE_EVENTFD: c_int = 2;
/// `RBD_LOCK_MODE_EXCLUSIVE`
pub(super) const LOCK_MODE_EXCLUSIVE: c_int = 0;
/// `RBD_IMAGE_OPTION_ORDER`
pub(super) const IMAGE_OPTION_ORDER: c_int = 2;
/// `RBD_IMAGE_OPTION_CLONE_FORMAT`
pub(super) const IMAGE_OPTION_CLONE_FORMAT: c_int = 12;

/// Names of the libraries; the number is that of their interface.
const RADOS: &CStr = c"librados.so.2";
const RBD: &CStr = c"librbd.so.1";

/// The first version of librbd with all functions used, that of Ceph 16.
const VERSION_MIN: (c_int, c_int) = (1, 16);

macro_rules! functions {
    ($($library:ident { $($name:ident($($argument:ty),*) $(-> $result:ty)?;)* })*) => {
        /// The functions, with the signatures of `rados/librados.h` and `rbd/librbd.h`.
        #[derive(Debug)]
        pub(crate) struct Functions {
            $($(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*)*
        }

        impl Functions {
            /// Looks up every function.
            fn look_up(rados: &SharedLibrary, rbd: &SharedLibrary) -> Result<Self, Error> {
                $(let $library = functions!(@ $library rados rbd);)*
                Ok(Self {
                    $($($name: {
                        let address = $library.address(concat!(stringify!($name), "\0"))?;
                        // SAFETY: an address of a function has the size of a function pointer. The signature is
                        // that of the library's header, which its soname and the checked version stand for.
                        unsafe {
                            std::mem::transmute::<
                                NonNull<c_void>,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(address)
                        }
                    },)*)*
                })
            }
        }
    };
    (@ of_rados $rados:ident $rbd:ident) => { $rados };
    (@ of_rbd $rados:ident $rbd:ident) => { $rbd };
}

functions! {
    of_rados {
    rados_create2(*mut Rados, *const c_char, *const c_char, u64) -> c_int;
    rados_conf_read_file(Rados, *const c_char) -> c_int;
    rados_conf_set(Rados, *const c_char, *const c_char) -> c_int;
    rados_connect(Rados) -> c_int;
    rados_shutdown(Rados);
    rados_cluster_fsid(Rados, *mut c_char, usize) -> c_int;
    rados_ioctx_create(Rados, *const c_char, *mut Ioctx) -> c_int;
    rados_ioctx_destroy(Ioctx);
    rados_ioctx_set_namespace(Ioctx, *const c_char);
    rados_ioctx_get_id(Ioctx) -> i64;
    rados_set_pool_full_try(Ioctx);
    rados_getaddrs(Rados, *mut *mut c_char) -> c_int;
    rados_buffer_free(*mut c_char);
    rados_blocklist_add(Rados, *mut c_char, u32) -> c_int;
    rados_wait_for_latest_osdmap(Rados) -> c_int;
    rados_create_read_op() -> ReadOp;
    rados_release_read_op(ReadOp);
    rados_read_op_omap_get_vals2(
        ReadOp, *const c_char, *const c_char, u64, *mut OmapIterator, *mut u8, *mut c_int
    );
    rados_read_op_operate(ReadOp, Ioctx, *const c_char, c_int) -> c_int;
    rados_omap_get_next2(
        OmapIterator, *mut *mut c_char, *mut *mut c_char, *mut usize, *mut usize
    ) -> c_int;
    rados_omap_get_end(OmapIterator);
    rados_create_write_op() -> WriteOp;
    rados_release_write_op(WriteOp);
    rados_write_op_create(WriteOp, c_int, *const c_char);
    rados_write_op_omap_cmp2(
        WriteOp, *const c_char, u8, *const c_char, usize, usize, *mut c_int
    );
    rados_write_op_omap_set2(
        WriteOp, *const *const c_char, *const *const c_char, *const usize, *const usize, usize
    );
    rados_write_op_omap_rm_keys2(WriteOp, *const *const c_char, *const usize, usize);
    rados_write_op_operate(WriteOp, Ioctx, *const c_char, *mut libc::time_t, c_int) -> c_int;
    rados_lock_shared(
        Ioctx, *const c_char, *const c_char, *const c_char, *const c_char, *const c_char,
        *mut libc::timeval, u8
    ) -> c_int;
    rados_unlock(Ioctx, *const c_char, *const c_char, *const c_char) -> c_int;
    rados_list_lockers(
        Ioctx, *const c_char, *const c_char, *mut c_int, *mut c_char, *mut usize, *mut c_char,
        *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize
    ) -> isize;
    rados_watch3(
        Ioctx, *const c_char, *mut u64, WatchCallback, WatchErrorCallback, u32, *mut c_void
    ) -> c_int;
    rados_unwatch2(Ioctx, u64) -> c_int;
    rados_watch_flush(Rados) -> c_int;
    rados_notify_ack(Ioctx, *const c_char, u64, u64, *const c_char, c_int) -> c_int;
    rados_aio_create_completion2(
        *mut c_void, Option<AioCallback>, *mut AioCompletion
    ) -> c_int;
    rados_aio_notify(
        Ioctx, *const c_char, AioCompletion, *const c_char, c_int, u64, *mut *mut c_char,
        *mut usize
    ) -> c_int;
    rados_aio_is_complete(AioCompletion) -> c_int;
    rados_aio_wait_for_complete(AioCompletion) -> c_int;
    rados_aio_release(AioCompletion);
    }

    of_rbd {
    rbd_version(*mut c_int, *mut c_int, *mut c_int);
    rbd_open(Ioctx, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    rbd_open_read_only(Ioctx, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    rbd_close(ImageHandle) -> c_int;
    rbd_stat(ImageHandle, *mut ImageInfo, usize) -> c_int;
    rbd_get_size(ImageHandle, *mut u64) -> c_int;
    rbd_get_features(ImageHandle, *mut u64) -> c_int;
    rbd_get_id(ImageHandle, *mut c_char, usize) -> c_int;
    rbd_get_stripe_unit(ImageHandle, *mut u64) -> c_int;
    rbd_config_image_list(ImageHandle, *mut ConfigOption, *mut c_int) -> c_int;
    rbd_config_image_list_cleanup(*mut ConfigOption, c_int);
    rbd_set_image_notification(ImageHandle, c_int, c_int) -> c_int;
    rbd_poll_io_events(ImageHandle, *mut Completion, c_int) -> c_int;
    rbd_aio_create_completion(*mut c_void, Option<IoCallback>, *mut Completion) -> c_int;
    rbd_aio_get_return_value(Completion) -> isize;
    rbd_aio_get_arg(Completion) -> *mut c_void;
    rbd_aio_release(Completion);
    rbd_aio_read(ImageHandle, u64, usize, *mut c_char, Completion) -> c_int;
    rbd_aio_readv(ImageHandle, *const libc::iovec, c_int, u64, Completion) -> c_int;
    rbd_aio_write(ImageHandle, u64, usize, *const c_char, Completion) -> c_int;
    rbd_aio_writev(ImageHandle, *const libc::iovec, c_int, u64, Completion) -> c_int;
    rbd_aio_flush(ImageHandle, Completion) -> c_int;
    rbd_aio_discard(ImageHandle, u64, u64, Completion) -> c_int;
    rbd_aio_write_zeroes(ImageHandle, u64, usize, Completion, c_int, c_int) -> c_int;
    rbd_aio_compare_and_write(
        ImageHandle, u64, usize, *const c_char, *const c_char, Completion, *mut u64, c_int
    ) -> isize;
    rbd_update_watch(ImageHandle, *mut u64, UpdateCallback, *mut c_void) -> c_int;
    rbd_update_unwatch(ImageHandle, u64) -> c_int;
    rbd_lock_acquire(ImageHandle, c_int) -> c_int;
    rbd_is_exclusive_lock_owner(ImageHandle, *mut c_int) -> c_int;
    rbd_diff_iterate2(
        ImageHandle, *const c_char, u64, u64, u8, u8, DiffCallback, *mut c_void
    ) -> c_int;
    rbd_list2(Ioctx, *mut NamedImage, *mut usize) -> c_int;
    rbd_image_spec_list_cleanup(*mut NamedImage, usize);
    rbd_image_options_create(*mut ImageOptions);
    rbd_image_options_destroy(ImageOptions);
    rbd_image_options_set_uint64(ImageOptions, c_int, u64) -> c_int;
    rbd_create4(Ioctx, *const c_char, u64, ImageOptions) -> c_int;
    rbd_clone3(
        Ioctx, *const c_char, *const c_char, Ioctx, *const c_char, ImageOptions
    ) -> c_int;
    rbd_remove(Ioctx, *const c_char) -> c_int;
    rbd_resize(ImageHandle, u64) -> c_int;
    rbd_flatten(ImageHandle) -> c_int;
    rbd_snap_create(ImageHandle, *const c_char) -> c_int;
    rbd_snap_remove(ImageHandle, *const c_char) -> c_int;
    rbd_snap_rollback(ImageHandle, *const c_char) -> c_int;
    rbd_snap_list(ImageHandle, *mut SnapshotInfo, *mut c_int) -> c_int;
    rbd_snap_list_end(*mut SnapshotInfo);
    rbd_snap_get_id(ImageHandle, *const c_char, *mut u64) -> c_int;
    }
}

impl Functions {
    /// The functions of the installed libraries, which are loaded by the first call.
    ///
    /// # Errors
    ///
    /// If a library is missing or too old, with the package as a hint.
    pub(crate) fn installed() -> Result<&'static Self, Error> {
        static INSTALLED: OnceLock<Result<Functions, Error>> = OnceLock::new();
        INSTALLED.get_or_init(|| Self::load(RADOS, RBD)).as_ref().map_err(Clone::clone)
    }

    fn load(rados: &CStr, rbd: &CStr) -> Result<Self, Error> {
        if cfg!(target_feature = "crt-static") {
            let text = "load librbd.so.1: this program is linked statically and loads no libraries, expected \
                        one that is linked dynamically";
            return Err(Error::environment(text).with_hint(
                "Use the program of the glibc package, or build it for a target with glibc.",
            ));
        }
        let rados = SharedLibrary::load(rados)?;
        let functions = Self::look_up(&rados, &SharedLibrary::load(rbd)?)?;
        functions.check_version()?;
        Ok(functions)
    }

    /// The version of librbd.
    pub(crate) fn version(&self) -> (c_int, c_int, c_int) {
        let (mut major, mut minor, mut extra) = (0, 0, 0);
        // SAFETY: the function stores three numbers, each to a variable that outlives the call.
        unsafe { (self.rbd_version)(&raw mut major, &raw mut minor, &raw mut extra) };
        (major, minor, extra)
    }

    fn check_version(&self) -> Result<(), Error> {
        let (major, minor, extra) = self.version();
        if major == VERSION_MIN.0 && minor >= VERSION_MIN.1 {
            return Ok(());
        }
        let text = format!(
            "load {}: version {major}.{minor}.{extra}, expected {}.{} or a later {}.x",
            name_of(RBD),
            VERSION_MIN.0,
            VERSION_MIN.1,
            VERSION_MIN.0
        );
        Err(Error::environment(text).with_hint("Install librbd1 of Ceph 16 or later."))
    }
}

/// A loaded shared library, never unloaded: its threads and callbacks have no end that this program sees.
struct SharedLibrary {
    name: String,
    handle: NonNull<c_void>,
}

impl SharedLibrary {
    fn load(name: &CStr) -> Result<Self, Error> {
        // SAFETY: the name is a C string. What the library runs while it is loaded are the initializers of
        // librados and librbd, which expect nothing of the program.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let Some(handle) = NonNull::new(handle) else {
            let text = format!("load {}: {}", name_of(name), last_loader_error());
            let hint = "Install the client library of Ceph 16 or later: `apt-get install librbd1` (Debian, \
                        Ubuntu), `dnf install librbd1` (Fedora, CentOS).";
            return Err(Error::environment(text).with_hint(hint));
        };
        Ok(Self { name: name_of(name).into_owned(), handle })
    }

    /// The address of a function, whose name ends with a NUL byte.
    fn address(&self, name: &'static str) -> Result<NonNull<c_void>, Error> {
        // SAFETY: the library is never unloaded, and the name ends with a NUL byte, which `functions!` adds.
        let address = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr().cast()) };
        NonNull::new(address).ok_or_else(|| {
            let (library, function) = (&self.name, name.trim_end_matches('\0'));
            let text =
                format!("load {library}: it has no function {function}, expected Ceph 16 or later");
            Error::environment(text).with_hint("Install librbd1 and librados2 of Ceph 16 or later.")
        })
    }
}

fn name_of(name: &CStr) -> std::borrow::Cow<'_, str> {
    name.to_string_lossy()
}

/// Why the last library could not be loaded.
fn last_loader_error() -> String {
    // SAFETY: it has no arguments, and returns the error of this thread.
    let text = NonNull::new(unsafe { libc::dlerror() });
    text.map_or_else(
        || "the loader gives no reason".to_owned(),
        // SAFETY: the loader returned a C string that is valid until the next call of this thread.
        |text| unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned(),
    )
}

#[cfg(test)]
mod tests {
    use tenmil_base::ErrorCategory;

    use super::{Functions, RBD};

    #[test]
    fn missing_library_error_names_the_library_and_its_package() {
        let refused = Functions::load(c"librados.so.987", RBD).unwrap_err();
        assert_eq!(refused.category, ErrorCategory::Environment);
        assert!(refused.text.starts_with("load librados.so.987: "), "{}", refused.text);
        assert!(refused.hint().unwrap().contains("apt-get install librbd1"), "{refused:?}");
    }

    #[test]
    fn library_without_the_functions_is_rejected_by_the_name_of_the_first() {
        let refused = Functions::load(c"libc.so.6", c"libc.so.6").unwrap_err();
        assert!(refused.text.contains("no function rados_create2"), "{}", refused.text);
    }
}
