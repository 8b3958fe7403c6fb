//! A storage application as an async task on the reactor that also polls the SSD. The task opens
//! another device itself; the blocking part of that runs on another thread while the reactor
//! continues.

use std::error::Error;

use tenmil::{Access, Device, Runtime};

async fn copy_a_block(rt: Runtime, device: Device) -> Result<bool, tenmil::Error> {
    let mut written = device.buffer(4096)?;
    written.store(0, b"ten million");
    let written = device.write(7, written).await?;
    device.flush().await?;

    let copy = rt.open("ram:16m", Access::ReadWrite).await?;
    let written = copy.write(7, written).await?;
    let read = copy.read(7, copy.buffer(4096)?).await?;
    Ok(read.to_vec() == written.to_vec())
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::new()?;
    let device = rt.block_on(rt.open("emu:ram", Access::ReadWrite))?;
    let task = device.spawn(copy_a_block(rt.clone(), device.clone()))?;
    assert!(rt.block_on(task)??, "what was read is not what was written");
    println!("written and read back on the reactor of {}", device.name());
    Ok(())
}
