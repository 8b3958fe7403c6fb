//! An emulated SSD, used from smol: one write is abandoned, another one completes.

use smol::future;
use tenmil::{Access, Device, Error, Runtime};

async fn write_and_read_back(device: &Device) -> Result<bool, Error> {
    // Polls once and drops the future. The buffer stays allocated until the SSD has completed the
    // write.
    future::poll_once(device.write(0, device.buffer(4096)?)).await;

    let mut written = device.buffer(4096)?;
    written.store(0, b"ten million");
    let written = device.write(8, written).await?;
    let read = device.read(8, device.buffer(4096)?).await?;
    Ok(read.to_vec() == written.to_vec())
}

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rt = Runtime::new()?;
    let same = smol::block_on(async {
        let device = rt.open("emu:ram", Access::ReadWrite).await?;
        let same = write_and_read_back(&device).await?;
        // Optional: the device is closed after the last handle is dropped. This waits for the
        // close.
        device.close().await;
        Ok::<_, Error>(same)
    })?;
    assert!(same, "what was read is not what was written");
    println!("written and read back by smol");
    Ok(())
}
