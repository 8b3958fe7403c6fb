//! Strings and versioned structures of the C interface.

use std::ffi::{CStr, c_char};

use crate::failure::Failure;

/// Returns the version of the library, such as "0.2.0".
///
/// The string belongs to the library, and is valid until the program ends.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Copies a string of the program, which `name` names in errors.
///
/// # Safety
///
/// `text` is null, or a string that ends with NUL.
pub(crate) unsafe fn copy_string(name: &str, text: *const c_char) -> Result<String, Failure> {
    if text.is_null() {
        return Err(Failure::usage(format_args!("{name}: found NULL, expected a string")));
    }
    // SAFETY: not null, so it ends with NUL, as the caller promises.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text.to_str();
    text.map(str::to_owned)
        .map_err(|_| Failure::usage(format_args!("{name}: found bytes that are not UTF-8")))
}

/// Writes `value` to `*into`, which `name` names in errors.
///
/// # Safety
///
/// `into` is null, or valid for a write of `T`.
pub(crate) unsafe fn store<T>(name: &str, into: *mut T, value: T) -> Result<(), Failure> {
    if into.is_null() {
        return Err(Failure::usage(format_args!("{name}: found NULL, expected an address")));
    }
    // SAFETY: not null, so it is valid for writes, as the caller promises. C aligns its own variables.
    unsafe { into.write(value) };
    Ok(())
}

/// Copies `text` with a terminating NUL to a buffer of `size` bytes, as much as fits. Returns the length of
/// the whole text.
///
/// # Safety
///
/// `into` is valid for writes of `size` bytes, or `size` is zero.
pub(crate) unsafe fn copy_text_out(text: &str, into: *mut c_char, size: usize) -> usize {
    let Some(room) = size.checked_sub(1).filter(|_| !into.is_null()) else { return text.len() };
    let count = text.floor_char_boundary(room);
    // SAFETY: `count` is less than `size`, and the text of this process does not overlap a buffer of the
    // program.
    unsafe { text.as_ptr().copy_to_nonoverlapping(into.cast(), count) };
    // SAFETY: `count` is less than `size`.
    let end = unsafe { into.add(count) };
    // SAFETY: it is inside the buffer, as just argued.
    unsafe { end.write(0) };
    text.len()
}

/// Reads a structure that begins with its size, of which a program may know fewer fields than the library:
/// the others are those of `T::default()`.
///
/// # Safety
///
/// `from` is null, or begins with a `u32` that is not more than the bytes there.
pub(crate) unsafe fn load_sized<T: SizedStruct>(name: &str, from: *const T) -> Result<T, Failure> {
    let mut value = T::default();
    if from.is_null() {
        return Ok(value);
    }
    // SAFETY: not null, so it begins with its size, as the caller promises.
    let size = unsafe { from.cast::<u32>().read() } as usize;
    check_size::<T>(name, size)?;
    let known = size.min(size_of::<T>());
    // SAFETY: the source has `size` bytes, as the caller promises, and any bytes are a valid `T`.
    unsafe { from.cast::<u8>().copy_to_nonoverlapping((&raw mut value).cast(), known) };
    Ok(value)
}

/// Writes a structure that begins with its size, of which the program may know fewer fields, or more: those
/// are zero. The size stays what the program has stored.
///
/// # Safety
///
/// `into` is null, or begins with a `u32` that is not more than the bytes that may be written there.
pub(crate) unsafe fn store_sized<T: SizedStruct>(
    name: &str,
    into: *mut T,
    value: &T,
) -> Result<(), Failure> {
    if into.is_null() {
        return Err(Failure::usage(format_args!("{name}: found NULL, expected a structure")));
    }
    // SAFETY: not null, so it begins with its size, as the caller promises.
    let size = unsafe { into.cast::<u32>().read() } as usize;
    check_size::<T>(name, size)?;
    let known = size.min(size_of::<T>());
    let (bytes, source) = (into.cast::<u8>(), (&raw const *value).cast::<u8>());
    let head = size_of::<u32>();
    // SAFETY: `size` bytes may be written, as the caller promises.
    unsafe { bytes.write_bytes(0, size) };
    // SAFETY: the source has `known` bytes and the target at least as many; they do not overlap, because the
    // source is a value of the library.
    unsafe { source.copy_to_nonoverlapping(bytes, known) };
    let size = u32::try_from(size).unwrap_or(u32::MAX).to_ne_bytes();
    // SAFETY: a structure has at least its size.
    unsafe { size.as_ptr().copy_to_nonoverlapping(bytes, head) };
    Ok(())
}

/// Structure of the interface that begins with its size in bytes, as a `u32`.
///
/// # Safety
///
/// Any bytes are a valid value, the layout is that of C, and the first field is the size.
pub(crate) unsafe trait SizedStruct: Default {
    /// Size in the first version of the library that had it.
    const FIRST_SIZE: usize;
}

/// Largest structure that is accepted: a size beyond it was not initialized.
const SIZE_MAX: usize = 4096;

fn check_size<T: SizedStruct>(name: &str, size: usize) -> Result<(), Failure> {
    if (T::FIRST_SIZE..=SIZE_MAX).contains(&size) {
        return Ok(());
    }
    let (first, now) = (T::FIRST_SIZE, size_of::<T>());
    let text = format!("{name}: size is {size}, expected at least {first}: sizeof is {now}");
    Err(Failure::usage(text).with_hint("Set the field `size` to sizeof of the structure."))
}
