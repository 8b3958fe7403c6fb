//! Writes one block and reads it back: the smallest complete program.

use tenmil::{Access, Error, Runtime};

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    // One reactor thread per core. Reactors poll while there is work and sleep otherwise.
    let rt = Runtime::new()?;
    let text = rt.block_on(write_and_read_one_block(&rt))?;
    assert_eq!(&text, b"ten million");
    println!("block 7 holds: {}", text.escape_ascii());
    Ok(())
}

async fn write_and_read_one_block(rt: &Runtime) -> Result<[u8; 11], Error> {
    // An emulated SSD, which needs no hardware. Other devices are opened by URI as well, such as
    // `file:/var/tmp/disk`, `tcp://…` or `pcie:…`.
    let device = rt.open("emu:ram", Access::ReadWrite).await?;

    // The buffer moves into the operation and comes back with the result; meanwhile the SSD owns
    // it.
    let mut buffer = device.buffer(device.limits().block_size)?;
    buffer.store(0, b"ten million");
    let buffer = device.write(7, buffer).await?;
    device.flush().await?;
    let buffer = device.read(7, buffer).await?;

    let mut text = [0; 11];
    buffer.load(0, &mut text);
    Ok(text)
}
