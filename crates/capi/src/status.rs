//! Status of a completion: class and text.

use std::ffi::c_char;

use tenmil_base::IoStatus;
use tenmil_wire::Status;

use crate::c_string::copy_text_out;

/// The I/O was executed.
pub const TENMIL_STATUS_CLASS_SUCCESS: u16 = 0;
/// The I/O is not valid for the device: operation, range or memory.
pub const TENMIL_STATUS_CLASS_INVALID: u16 = 1;
/// The medium has lost data, or could not store it.
pub const TENMIL_STATUS_CLASS_MEDIUM: u16 = 2;
/// A compare has found other bytes.
pub const TENMIL_STATUS_CLASS_COMPARE: u16 = 3;
/// Another host or process has reserved or owns the device, or it is write protected.
pub const TENMIL_STATUS_CLASS_CONFLICT: u16 = 4;
/// The path to the device failed, or the device was removed. Whether the I/O was executed is not known.
pub const TENMIL_STATUS_CLASS_PATH: u16 = 5;
/// The I/O was not executed, and may be submitted again.
pub const TENMIL_STATUS_CLASS_RETRY: u16 = 6;
/// The I/O was aborted.
pub const TENMIL_STATUS_CLASS_ABORTED: u16 = 7;
/// Another error of the device.
pub const TENMIL_STATUS_CLASS_OTHER: u16 = 8;

/// Class of a status.
#[inline]
pub(crate) fn class_of(status: IoStatus) -> u16 {
    if status.is_success() { TENMIL_STATUS_CLASS_SUCCESS } else { class_of_error(status) }
}

#[cold]
fn class_of_error(status: IoStatus) -> u16 {
    // Without Command Retry Delay, More and Do Not Retry (NVM Express Base 2.1, figure 100).
    match IoStatus(status.0 & 0x7ff) {
        IoStatus::INVALID_OPCODE
        | IoStatus::INVALID_FIELD
        | IoStatus::DATA_TRANSFER_ERROR
        | IoStatus::LBA_OUT_OF_RANGE => TENMIL_STATUS_CLASS_INVALID,
        IoStatus::COMPARE_FAILURE => TENMIL_STATUS_CLASS_COMPARE,
        IoStatus::RESERVATION_CONFLICT | IoStatus::WRITE_PROTECTED => TENMIL_STATUS_CLASS_CONFLICT,
        IoStatus::INTERRUPTED => TENMIL_STATUS_CLASS_RETRY,
        IoStatus::ABORTED | IoStatus::ABORTED_BY_HOST => TENMIL_STATUS_CLASS_ABORTED,
        IoStatus::NO_DEVICE => TENMIL_STATUS_CLASS_PATH,
        IoStatus(code) => match code >> 8 {
            2 => TENMIL_STATUS_CLASS_MEDIUM,
            3 => TENMIL_STATUS_CLASS_PATH,
            _ => TENMIL_STATUS_CLASS_OTHER,
        },
    }
}

/// Writes the name of a status and its codes to `text`, as much as fits into `size` bytes with the
/// terminating NUL. Returns the length of the whole text without the NUL, as snprintf() does.
///
/// The buffer belongs to the caller.
///
/// # Safety
///
/// `text` is valid for writes of `size` bytes, or `size` is zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_status_text(status: u16, text: *mut c_char, size: usize) -> usize {
    // SAFETY: the caller promises the same of the buffer.
    unsafe { copy_text_out(&Status(status).to_string(), text, size) }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use tenmil_base::IoStatus;

    use super::{
        TENMIL_STATUS_CLASS_COMPARE, TENMIL_STATUS_CLASS_INVALID, TENMIL_STATUS_CLASS_MEDIUM,
        TENMIL_STATUS_CLASS_OTHER, TENMIL_STATUS_CLASS_PATH, TENMIL_STATUS_CLASS_SUCCESS, class_of,
        tenmil_status_text,
    };

    #[test]
    fn class_ignores_the_bits_that_are_no_code() {
        for (status, class) in [
            (0, TENMIL_STATUS_CLASS_SUCCESS),
            (0x80, TENMIL_STATUS_CLASS_INVALID),
            (0x4080, TENMIL_STATUS_CLASS_INVALID),
            (0x285, TENMIL_STATUS_CLASS_COMPARE),
            (0x4281, TENMIL_STATUS_CLASS_MEDIUM),
            (0x302, TENMIL_STATUS_CLASS_PATH),
            (0x06, TENMIL_STATUS_CLASS_OTHER),
        ] {
            assert_eq!(class_of(IoStatus(status)), class, "{status:x}h");
        }
    }

    #[test]
    fn text_of_a_status_is_cut_to_the_buffer() {
        let mut text = [1; 16];
        // SAFETY: the buffer has 16 bytes.
        let len = unsafe { tenmil_status_text(0x285, text.as_mut_ptr().cast(), text.len()) };
        let found = CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap();
        assert_eq!(found, "Compare Failure");
        assert!(len > 15, "the whole text has the codes, too: {len}");
        // SAFETY: no buffer.
        assert_eq!(unsafe { tenmil_status_text(0x285, std::ptr::null_mut(), 0) }, len);
    }
}
