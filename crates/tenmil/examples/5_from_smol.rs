//! An SSD of ours, used from smol: a write that nobody waits for any more, and one that counts.

use std::error::Error;

use host::{Clock, Cores};
use reactor::{ReactorOptions, Reactors, ThreadPlan};
use smol::future;
use tenmil::aio::{Claim, Device, Opener};

async fn write_and_read_back(device: &Device) -> Result<bool, Box<dyn Error>> {
    let abandoned = device.buffer(4096).ok_or("no memory for a buffer")?;
    // One poll, and the future is gone. Its buffer stays where it is until the SSD has answered.
    future::poll_once(device.write(0, abandoned)).await;

    let mut written = device.buffer(4096).ok_or("no memory for a buffer")?;
    written.store(0, b"ten million");
    let written = device.write(8, written).await?;
    let read = device.read(8, device.buffer(4096).ok_or("no memory for a buffer")?).await?;
    Ok(read.to_vec() == written.to_vec())
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let clock = Clock::start();
    let reactors = Reactors::start(&Cores::allowed(), &ReactorOptions::default(), &clock)?;
    let thread = reactors.spawn(ThreadPlan::new("storage"))?;
    let opener = Opener::new(&clock)?;

    let same = smol::block_on(async {
        let device = opener.open(&"emu:ram".parse()?, Claim::WriteOnce, &thread).await?;
        let same = write_and_read_back(&device).await?;
        // Not needed: it is closed once the last handle has gone. Here one waits until it is.
        device.close().await;
        Ok::<_, Box<dyn Error>>(same)
    })?;
    assert!(same, "what was read is not what was written");
    println!("written and read back by smol");
    Ok(())
}
