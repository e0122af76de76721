from emu.cli import main

main()
