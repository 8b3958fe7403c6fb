//! A device that fails on purpose: `fault:` injects errors, delays and hanging requests by rules, so
//! that the error handling of a program can be tested. `cargo xtask sim` tests this project's own: drivers
//! on simulated SSDs that violate the specification.

use std::error::Error;

use tenmil::driver::IoStatus;
use tenmil::{Access, IoErrorKind, Runtime};

/// The second read of each of the first eight blocks fails, and the third write of any.
const DISK: &str = "fault:[ram:16m]?rule=error:read@4-7x2;error:write/3";

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::new()?;
    rt.block_on(async {
        let device = rt.open(DISK, Access::ReadWrite).await?;
        let mut buffer = device.buffer(device.limits().block_size)?;
        let (mut reads, mut failed) = (0, 0);
        for lba in 0..8 {
            // A failed operation returns its buffer, and is tried again.
            buffer = loop {
                match device.read(lba, buffer).await {
                    Ok(buffer) => break buffer,
                    Err(error) if error.why == IoErrorKind::Status(IoStatus::UNRECOVERED_READ) => {
                        println!("{error}");
                        failed += 1;
                        buffer = error.buffer.ok_or("a buffer that came back")?;
                    }
                    Err(error) => return Err(error.into()),
                }
            };
            reads += 1;
        }
        assert_eq!((reads, failed), (8, 2), "two reads of blocks 4 to 7 fail");
        println!("{reads} blocks were read, {failed} of them by a second attempt");
        Ok::<_, Box<dyn Error>>(())
    })
}
