//! An emulated SSD, used from smol: one write is abandoned, another one completes.

use std::error::Error;

use smol::future;
use tenmil::aio::{Claim, Device, Opener};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{ReactorOptions, Reactors, ThreadBuilder};

async fn write_and_read_back(device: &Device) -> Result<bool, Box<dyn Error>> {
    let abandoned = device.buffer(4096).ok_or("no memory for a buffer")?;
    // Polls once and drops the future. The buffer stays allocated until the SSD has completed the
    // write.
    future::poll_once(device.write(0, abandoned)).await;

    let mut written = device.buffer(4096).ok_or("no memory for a buffer")?;
    written.store(0, b"ten million");
    let written = device.write(8, written).await?;
    let read = device.read(8, device.buffer(4096).ok_or("no memory for a buffer")?).await?;
    Ok(read.to_vec() == written.to_vec())
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let clock = Clock::start();
    let reactors = Reactors::start(&CpuList::allowed(), &ReactorOptions::default(), &clock)?;
    let thread = reactors.spawn(ThreadBuilder::new("storage"))?;
    let opener = Opener::new(&clock)?;

    let same = smol::block_on(async {
        let device = opener.open(&"emu:ram".parse()?, Claim::WriteOnce, &thread).await?;
        let same = write_and_read_back(&device).await?;
        // Optional: the device is closed after the last handle is dropped. This waits for the
        // close.
        device.close().await;
        Ok::<_, Box<dyn Error>>(same)
    })?;
    assert!(same, "what was read is not what was written");
    println!("written and read back by smol");
    Ok(())
}
